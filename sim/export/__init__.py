"""Plans as text: launch commands, manifests, tables and a report. Pure: a plan in, text out."""
