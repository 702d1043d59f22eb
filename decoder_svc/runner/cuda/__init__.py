"""The CUDA runner: attention backends for paged KV blocks."""
