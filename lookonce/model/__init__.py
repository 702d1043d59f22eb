"""Model folders: checks them, loads one half of a model, computes the vision half's fingerprint, compiles kernels."""
