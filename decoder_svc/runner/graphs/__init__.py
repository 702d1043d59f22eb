"""Recorded graphs of steps: their inputs, one table for each kind of step, and the choice between them."""
