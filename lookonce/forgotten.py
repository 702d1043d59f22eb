"""Which images every process is to forget, and how that is said to all of them.

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
# A message of more keys than an operator may name in a call is not one of ours, and is not looked into.
_MAX_KEYS = 256


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Images that were removed from the shared cache."""

    # ContentKey.value of each; None: all images.
    keys: frozenset[bytes] | None

    def includes(self, key: bytes) -> bool:
        """Whether the image with this ContentKey.value is among them."""
        return self.keys is None or key in self.keys

    def and_also(self, other: Forgotten) -> Forgotten:
        """What either means."""
        if self.keys is None or other.keys is None:
            return EVERYTHING
        return Forgotten(self.keys | other.keys)

    @classmethod
    def of(cls, keys: Sequence[ContentKey]) -> Self:
        """These images."""
        return cls(frozenset(key.value for key in keys))


EVERYTHING = Forgotten(None)


def new_token() -> bytes:
    """Names a message."""
    return secrets.token_hex(TOKEN_BYTES // 2).encode()


def to_message(token: bytes, forgotten: Forgotten) -> bytes:
    """What goes over the channel."""
    return token + (_EVERYTHING if forgotten.keys is None else b"".join(sorted(forgotten.keys)))


def parse_message(message: bytes) -> tuple[bytes, Forgotten]:
    """(token, images); what says nothing sensible means everything, which costs time only."""
    token, keys = message[:TOKEN_BYTES], message[TOKEN_BYTES:]
    if not keys or len(keys) % _KEY_BYTES or len(keys) > _MAX_KEYS * _KEY_BYTES:
        return token, EVERYTHING
    return token, Forgotten(frozenset(keys[at : at + _KEY_BYTES] for at in range(0, len(keys), _KEY_BYTES)))
