"""Results: per-request records, quantiles, summaries."""
