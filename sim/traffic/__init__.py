"""Traffic: arrivals, lengths and traces, as an iterator of requests."""
