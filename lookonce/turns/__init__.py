"""Turns: tenants and calls share threads, processes and forward passes, counted by the cost of their work."""
