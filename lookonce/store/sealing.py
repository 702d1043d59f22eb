"""Seals of the values in the shared cache: a checksum against accidents, or AES-256-GCM against the cache's owner.

With a key file, the owner of the cache can still delete entries and see their sizes, but cannot read, swap or forge
rows. Records (headers and metadata) carry an HMAC-SHA-256. Each block of rows is encrypted under a key derived for its
entry; the entry's identity is the associated data, and the block's index is the nonce.
"""

from __future__ import annotations

import hashlib
import hmac
import pathlib
from collections.abc import Sequence
from typing import Protocol

import xxhash

from lookonce.errors import ConfigurationError

KEY_BYTES = 32
_MAX_KEYS = 8
_RECORD_DOMAIN = b"lookonce/seal/record/1"
_ENTRY_DOMAIN = b"lookonce/seal/entry/1"


class BlockCipher(Protocol):
    """Seals and opens the blocks of one entry."""

    def seal(self, index: int, block: memoryview) -> tuple[memoryview, bytes]:
        """Returns (bytes to store, as many as in `block`; the seal) for block `index`."""
        ...

    def open(self, index: int, stored: memoryview, seal: bytes, out: memoryview) -> bool:
        """Writes the block's bytes into `out`, which may be `stored` itself. Returns False for a wrong seal."""
        ...


class Sealer(Protocol):
    """One kind of seal, for records and for blocks of rows."""

    # Number that identifies this kind in a record.
    kind: int
    record_seal_bytes: int
    block_seal_bytes: int

    def seal_record(self, data: bytes) -> bytes:
        """Returns the seal of a record, which itself stays in the clear."""
        ...

    def key_of_record(self, data: memoryview, seal: bytes) -> int | None:
        """Returns the index of the key that sealed this record; None when the seal does not match."""
        ...

    def blocks(self, key_index: int, identity: bytes) -> BlockCipher:
        """Returns the cipher for an entry's blocks. `identity`: the start of its header, with its random nonce."""
        ...


class Checksum:
    """XXH3-64 checksums (32 GB/s), which detect accidental damage. The default."""

    kind = 1
    record_seal_bytes = 8
    block_seal_bytes = 8

    def seal_record(self, data: bytes) -> bytes:
        """Returns the checksum of the record, little-endian."""
        return _xxh3(memoryview(data))

    def key_of_record(self, data: memoryview, seal: bytes) -> int | None:
        """Returns 0 when the checksum matches, else None."""
        return 0 if _xxh3(data) == seal else None

    def blocks(self, key_index: int, identity: bytes) -> BlockCipher:
        """Returns the cipher that stores blocks unchanged."""
        return _ChecksumBlocks()


class _ChecksumBlocks:
    def seal(self, index: int, block: memoryview) -> tuple[memoryview, bytes]:
        return block, _xxh3(block)

    def open(self, index: int, stored: memoryview, seal: bytes, out: memoryview) -> bool:
        if _xxh3(stored) != seal:
            return False
        if out is not stored:
            out[:] = stored
        return True


class AesGcm:
    """AES-256-GCM under one of several keys.

    The first key seals, and every key opens. To rotate, put the new key in front and remove the old one when its
    entries have expired.
    """

    kind = 2
    record_seal_bytes = hashlib.sha256().digest_size
    block_seal_bytes = 16

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not 1 <= len(keys) <= _MAX_KEYS or any(len(key) != KEY_BYTES for key in keys):
            raise ConfigurationError(f"seal keys: 1 to {_MAX_KEYS} keys of {KEY_BYTES} bytes are needed")
        # Imported here, because a service without keys need not hold the library.
        from lookonce.store.gcm_blocks import GcmBlocks

        self._blocks = GcmBlocks
        self._keys = tuple(keys)
        self._record_keys = tuple(_derived(key, _RECORD_DOMAIN) for key in keys)

    def seal_record(self, data: bytes) -> bytes:
        """Returns the HMAC-SHA-256 of the record, untruncated."""
        return hmac.digest(self._record_keys[0], data, "sha256")

    def key_of_record(self, data: memoryview, seal: bytes) -> int | None:
        """Returns the index of the key that sealed this record, found in constant time per key; None for no key."""
        for index, key in enumerate(self._record_keys):
            if hmac.compare_digest(hmac.digest(key, data, "sha256"), seal):
                return index
        return None

    def blocks(self, key_index: int, identity: bytes) -> BlockCipher:
        """Returns the cipher under a key of this entry alone, so that a block's index may be its nonce."""
        return self._blocks(_derived(self._keys[key_index], _ENTRY_DOMAIN + identity), identity)


def load_sealer(key_file: pathlib.Path | None) -> Sealer:
    """Returns AES-256-GCM with the keys of a file, one of 64 hex characters per line; without a file, checksums.

    Raises ConfigurationError for a file that cannot be read or holds something else.
    """
    if key_file is None:
        return Checksum()
    try:
        keys = [bytes.fromhex(line) for line in key_file.read_text("ascii").split()]
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"seal_key_file: {key_file} must be readable and hold lines of {2 * KEY_BYTES} hex characters "
            f"({type(error).__name__})"
        ) from None
    return AesGcm(keys)


def _derived(key: bytes, purpose: bytes) -> bytes:
    """Derives a key for one purpose by HMAC-SHA-256 as the pseudo-random function (NIST SP 800-108, one block)."""
    return hmac.digest(key, purpose, "sha256")


def _xxh3(data: memoryview) -> bytes:
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")
