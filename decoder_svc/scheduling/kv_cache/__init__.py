"""The prefix-cached KV cache in plain Python: the hashes of blocks, the pool, and each request's block tables."""
