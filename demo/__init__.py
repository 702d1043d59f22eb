"""A small picture-question model, trained from pictures that this package draws."""
