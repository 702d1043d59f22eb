"""Images that every process must forget, and the message that says so.

message = token (32 hex characters) | keys (32 bytes each), "+" and file tags (32 bytes each), or "*" for all images

A process of an older version reads a message with file tags as one about all images, which is right as well.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from lookonce.content_key import ContentKey

_EVERYTHING = b"*"
_FILES = b"+"
# Bytes of a key, and of a file tag.
_KEY_BYTES = 32
TOKEN_BYTES = 32
# Largest number of keys or files that an operator may name in one call. A message with more is not parsed.
_MAX_KEYS = 256


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A set of images, or all images, that were removed from the shared cache."""

    # ContentKey.value of each image; None stands for all images.
    keys: frozenset[bytes] | None
    # `file_tag` of each file of which every image and pair is in the set.
    files: frozenset[bytes] = field(default=frozenset())

    def includes(self, key: bytes, file_tags: Sequence[bytes] = ()) -> bool:
        """Returns whether an image is in the set, by its ContentKey.value and the tags of its files.

        Without tags, an image may be of any file: it is in every set that has files.
        """
        if self.keys is None or key in self.keys:
            return True
        return bool(self.files) and (not file_tags or not self.files.isdisjoint(file_tags))

    def and_also(self, other: Forgotten) -> Forgotten:
        """Returns the union of both sets."""
        if self.keys is None or other.keys is None:
            return EVERYTHING
        return Forgotten(self.keys | other.keys, self.files | other.files)

    @classmethod
    def of(cls, keys: Sequence[ContentKey]) -> Self:
        """Returns the set of these images."""
        return cls(frozenset(key.value for key in keys))

    @classmethod
    def of_files(cls, file_tags: Sequence[bytes]) -> Self:
        """Returns the set of all images and pairs of these files."""
        return cls(frozenset(), frozenset(file_tags))


EVERYTHING = Forgotten(None)
NOTHING = Forgotten(frozenset())


def new_token() -> bytes:
    """Returns a random token that identifies a message."""
    return secrets.token_hex(TOKEN_BYTES // 2).encode()


def to_message(token: bytes, forgotten: Forgotten) -> bytes:
    """Returns the message for the channel. It names keys or files; a set with both becomes one of all images."""
    if forgotten.keys is None or (forgotten.keys and forgotten.files):
        return token + _EVERYTHING
    if forgotten.files:
        return token + _FILES + b"".join(sorted(forgotten.files))
    return token + b"".join(sorted(forgotten.keys))


def parse_message(message: bytes) -> tuple[bytes, Forgotten]:
    """Returns (token, images). A malformed message stands for all images, which costs time only."""
    token, names = message[:TOKEN_BYTES], message[TOKEN_BYTES:]
    has_files = names.startswith(_FILES) and len(names) % _KEY_BYTES == 1
    names = names[1:] if has_files else names
    if not names or len(names) % _KEY_BYTES or len(names) > _MAX_KEYS * _KEY_BYTES:
        return token, EVERYTHING
    named = frozenset(names[at : at + _KEY_BYTES] for at in range(0, len(names), _KEY_BYTES))
    return token, Forgotten(frozenset(), named) if has_files else Forgotten(named)
