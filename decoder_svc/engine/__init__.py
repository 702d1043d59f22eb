"""Runs scheduler and runner in the engine thread, and delivers outputs to the event loop."""
