"""Cost of a step: operators to seconds."""
