"""Errors that say which file, field or tensor of a model folder is wrong, after transformers or torch has failed."""
