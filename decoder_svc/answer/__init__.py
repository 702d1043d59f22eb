"""Turns tokens into text and text into an answer."""
