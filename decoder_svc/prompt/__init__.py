"""Turns a request as stated into token ids and image spans."""
