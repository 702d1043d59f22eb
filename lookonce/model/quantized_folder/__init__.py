"""Model folders whose weights are stored as codes: compressed-tensors, GPTQ, AWQ and FP8."""
