"""Images that every process must forget, and the message that says so.

message = token (32 hex characters) | keys (32 bytes each), or "*" for all images
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from lookonce.content_key import ContentKey

_EVERYTHING = b"*"
_KEY_BYTES = 32
TOKEN_BYTES = 32
# Largest number of keys that an operator may name in one call. A message with more is not ours and is not parsed.
_MAX_KEYS = 256


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A set of images, or all images, that were removed from the shared cache."""

    # ContentKey.value of each image; None stands for all images.
    keys: frozenset[bytes] | None

    def includes(self, key: bytes) -> bool:
        """Returns whether the image with this ContentKey.value is in the set."""
        return self.keys is None or key in self.keys

    def and_also(self, other: Forgotten) -> Forgotten:
        """Returns the union of both sets."""
        if self.keys is None or other.keys is None:
            return EVERYTHING
        return Forgotten(self.keys | other.keys)

    @classmethod
    def of(cls, keys: Sequence[ContentKey]) -> Self:
        """Returns the set of these images."""
        return cls(frozenset(key.value for key in keys))


EVERYTHING = Forgotten(None)


def new_token() -> bytes:
    """Returns a random token that identifies a message."""
    return secrets.token_hex(TOKEN_BYTES // 2).encode()


def to_message(token: bytes, forgotten: Forgotten) -> bytes:
    """Returns the message for the channel."""
    return token + (_EVERYTHING if forgotten.keys is None else b"".join(sorted(forgotten.keys)))


def parse_message(message: bytes) -> tuple[bytes, Forgotten]:
    """Returns (token, images). A malformed message stands for all images, which costs time only."""
    token, keys = message[:TOKEN_BYTES], message[TOKEN_BYTES:]
    if not keys or len(keys) % _KEY_BYTES or len(keys) > _MAX_KEYS * _KEY_BYTES:
        return token, EVERYTHING
    return token, Forgotten(frozenset(keys[at : at + _KEY_BYTES] for at in range(0, len(keys), _KEY_BYTES)))
