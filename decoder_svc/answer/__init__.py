"""The answer of a request: the tokens that the engine generates, as text for the caller."""
