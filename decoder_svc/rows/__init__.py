"""Fetches embedding rows from the shared cache or the encoder."""
