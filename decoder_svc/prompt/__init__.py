"""Turns a caller's prompt into token ids, image spans and checked sampling parameters."""
