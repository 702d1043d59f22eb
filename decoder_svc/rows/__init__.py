"""Fetches embedding rows from the shared cache or from the encoder service."""
