"""Libraries that load models: what of them is imported, and their faults as errors of Python."""
