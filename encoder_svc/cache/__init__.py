"""Decides who encodes an image, and keeps the rows in the local and the shared cache."""
