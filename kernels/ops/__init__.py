"""The Triton kernels, one file each, with its torch reference beside it."""
