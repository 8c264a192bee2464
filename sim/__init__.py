"""Predicts: pure capacity, traffic and scheduling models; the clock lives in `engine` alone."""
