"""Which images every process is to forget, and how that is said to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from lookonce.content_key import ContentKey

_EVERYTHING = b"*"
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Images that were removed from the shared cache."""

    # ContentKey.value of each; None: all images.
    keys: frozenset[bytes] | None

    def includes(self, key: bytes) -> bool:
        """Whether the image with this ContentKey.value is among them."""
        return self.keys is None or key in self.keys

    def to_bytes(self) -> bytes:
        """The message on the channel."""
        return _EVERYTHING if self.keys is None else b"".join(sorted(self.keys))

    @classmethod
    def of(cls, keys: Sequence[ContentKey]) -> Self:
        """These images."""
        return cls(frozenset(key.value for key in keys))

    @classmethod
    def from_bytes(cls, message: bytes) -> Self:
        """What a message says; one that says nothing sensible means everything, which costs time only."""
        if not message or len(message) % _KEY_BYTES:
            return cls(None)
        return cls(frozenset(message[start : start + _KEY_BYTES] for start in range(0, len(message), _KEY_BYTES)))


EVERYTHING = Forgotten(None)
