"""The process itself: its memory. Knows nothing of models, requests or caches."""
