"""Searches over deployments: grids of points, and how they are run on many processors."""
