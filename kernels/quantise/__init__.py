"""Number formats in torch: quantise, pack the way the kernels read, unpack exactly."""
