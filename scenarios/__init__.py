"""Scenarios: the schema of a YAML file and the catalogue that ships with the package."""
