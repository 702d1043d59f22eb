"""Runs the system on one machine (`lookonce up`) and checks it (`lookonce doctor`)."""
