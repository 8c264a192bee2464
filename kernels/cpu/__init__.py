"""The registry's kernels on a CPU, through torch."""
