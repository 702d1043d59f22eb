"""Turns pixels into embedding rows: batches, forward passes and row formats."""
