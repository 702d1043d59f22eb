"""The earlier tokens that a token sees in layers with local attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """The last tokens of a sequence (a sliding window), or those of a token's own chunk of the sequence (Llama 4)."""

    # Tokens that a token sees, itself included; or the tokens of each chunk, from the sequence's first token on.
    size: int
    is_chunked: bool = False

    def first_seen(self, token: int) -> int:
        """Returns the first token that `token` sees. Later tokens never see earlier ones than that."""
        if self.is_chunked:
            return token // self.size * self.size
        return max(0, token - self.size + 1)
