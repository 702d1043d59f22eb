"""The CPU runner: native kernels and packed weights."""
