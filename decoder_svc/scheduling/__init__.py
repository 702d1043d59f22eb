"""The scheduler and its block tables, in plain Python."""
