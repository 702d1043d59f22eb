"""JSON schemas: what of them is served, in the words of llguidance."""
