"""Receives the messages of admitted calls, within bounds on memory and on silence. Decides nothing about callers."""
