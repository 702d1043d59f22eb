"""The tokens of a step between the logits and the engine: under constraints, on the device, and known to the host."""
