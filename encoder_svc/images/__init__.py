"""Turns image files into pixels, in processes with bounded memory and time."""
