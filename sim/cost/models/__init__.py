"""One predictor per operator, from a profile's tables and fitted forms to seconds."""
