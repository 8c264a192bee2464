"""Readers of what other tools measured, converted to this package's definitions and SI."""
