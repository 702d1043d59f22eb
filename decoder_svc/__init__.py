"""The decoder service: prompt and image references → tokens."""
