"""Readers of kernel timings that others measured."""
