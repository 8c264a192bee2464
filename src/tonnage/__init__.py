"""Capacity planner for serving large language models."""
