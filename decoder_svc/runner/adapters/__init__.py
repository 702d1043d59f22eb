"""LoRA adapters of the language model: their matrices, and the tokens of a step to which each applies."""
