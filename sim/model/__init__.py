"""Model geometry: what a checkpoint holds and what fits on a GPU."""
