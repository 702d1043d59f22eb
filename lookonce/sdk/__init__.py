"""Channels, credentials and messages behind `lookonce.Client` and `lookonce.AsyncClient`."""
