"""How what lies in the shared cache is sealed: a checksum against accidents, or AES-256-GCM against its owner.

With a key file whoever owns the cache can still delete entries and see how large they are, but neither read rows, nor
swap, nor forge them: records (headers, descriptions) carry an HMAC-SHA-256, and each block of rows is encrypted under
a key of its entry, with the entry's identity and the block's place as associated data.
"""

from __future__ import annotations

import hashlib
import hmac
import pathlib
from collections.abc import Sequence
from typing import Protocol

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lookonce.errors import ConfigurationError

KEY_BYTES = 32
_MAX_KEYS = 8
_RECORD_DOMAIN = b"lookonce/seal/record/1"
_ENTRY_DOMAIN = b"lookonce/seal/entry/1"
_GCM_NONCE_BYTES = 12


class BlockCipher(Protocol):
    """Seals the blocks of one entry."""

    def seal(self, index: int, block: memoryview) -> tuple[memoryview, bytes]:
        """(bytes to store, as many as there were; the seal) of block `index`."""
        ...

    def open(self, index: int, stored: memoryview, seal: bytes, out: memoryview) -> bool:
        """Puts the block's bytes into `out`, which may be `stored` itself. False when the seal does not fit."""
        ...


class Sealer(Protocol):
    """One way of sealing."""

    # Number of the way in a record.
    kind: int
    record_seal_bytes: int
    block_seal_bytes: int

    def seal_record(self, data: bytes) -> bytes:
        """The seal of a record that stays in the clear."""
        ...

    def key_of_record(self, data: memoryview, seal: bytes) -> int | None:
        """Which key sealed this record; None when none of ours did, or not this record."""
        ...

    def blocks(self, key_index: int, identity: bytes) -> BlockCipher:
        """The blocks of an entry whose header begins with `identity`, its random nonce included."""
        ...


class Checksum:
    """XXH3-64 (32 GB/s): notices every accident. The default."""

    kind = 1
    record_seal_bytes = 8
    block_seal_bytes = 8

    def seal_record(self, data: bytes) -> bytes:
        """The checksum, little-endian."""
        return _xxh3(memoryview(data))

    def key_of_record(self, data: memoryview, seal: bytes) -> int | None:
        """0 when the checksum fits."""
        return 0 if _xxh3(data) == seal else None

    def blocks(self, key_index: int, identity: bytes) -> BlockCipher:
        """Blocks are stored as they are."""
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
    """AES-256-GCM. The first key seals, every key opens: a new one goes in front, the old one when its entries died."""

    kind = 2
    record_seal_bytes = hashlib.sha256().digest_size
    block_seal_bytes = 16

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not 1 <= len(keys) <= _MAX_KEYS or any(len(key) != KEY_BYTES for key in keys):
            raise ConfigurationError(f"seal keys: 1 to {_MAX_KEYS} keys of {KEY_BYTES} bytes are needed")
        self._keys = tuple(keys)
        self._record_keys = tuple(_derived(key, _RECORD_DOMAIN) for key in keys)

    def seal_record(self, data: bytes) -> bytes:
        """HMAC-SHA-256, whole."""
        return hmac.digest(self._record_keys[0], data, "sha256")

    def key_of_record(self, data: memoryview, seal: bytes) -> int | None:
        """Compares in constant time."""
        for index, key in enumerate(self._record_keys):
            if hmac.compare_digest(hmac.digest(key, data, "sha256"), seal):
                return index
        return None

    def blocks(self, key_index: int, identity: bytes) -> BlockCipher:
        """Encrypted under a key of this entry alone, so that a block's number may be its nonce."""
        return _AesGcmBlocks(_derived(self._keys[key_index], _ENTRY_DOMAIN + identity), identity)


class _AesGcmBlocks:
    def __init__(self, key: bytes, identity: bytes) -> None:
        self._cipher = AESGCM(key)
        self._identity = identity

    def seal(self, index: int, block: memoryview) -> tuple[memoryview, bytes]:
        sealed = memoryview(self._cipher.encrypt(_gcm_nonce(index), block, self._identity))
        return sealed[: block.nbytes], bytes(sealed[block.nbytes :])

    def open(self, index: int, stored: memoryview, seal: bytes, out: memoryview) -> bool:
        try:
            opened = self._cipher.decrypt(_gcm_nonce(index), b"".join((stored, seal)), self._identity)
        except InvalidTag:
            return False
        out[:] = opened
        return True


def load_sealer(key_file: pathlib.Path | None) -> Sealer:
    """The sealer of a key file with one key per line, 64 hex characters each; without a file it is the checksum.

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
    """A key of its own for a purpose: HMAC-SHA-256 as a pseudo-random function (NIST SP 800-108, one block)."""
    return hmac.digest(key, purpose, "sha256")


def _gcm_nonce(index: int) -> bytes:
    return index.to_bytes(_GCM_NONCE_BYTES, "big")


def _xxh3(data: memoryview) -> bytes:
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")
