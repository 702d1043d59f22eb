"""Model folders: loads one half of a model, and computes the vision half's fingerprint."""
