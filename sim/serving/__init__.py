"""Serving decisions: pages, batches and routing, without a clock."""
