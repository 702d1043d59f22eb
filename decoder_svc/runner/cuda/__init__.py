"""The CUDA runner, and its attention backends for paged KV blocks."""
