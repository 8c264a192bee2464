"""Kernels to profiles: importers, fits, and how well they hold."""
