"""One tensor-parallel rank of a model on a real device: weights, paged memory, batches, steps."""
