"""Blocks of rows under AES-256-GCM. The only module of the store that loads a library for encryption."""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE_BYTES = 12


class GcmBlocks:
    """The cipher of one entry's blocks; implements `BlockCipher` of sealing.py."""

    def __init__(self, key: bytes, identity: bytes) -> None:
        """`key` belongs to this entry alone, so a block's index may be its nonce."""
        self._cipher = AESGCM(key)
        self._identity = identity

    def seal(self, index: int, block: memoryview) -> tuple[memoryview, bytes]:
        """Returns (encrypted bytes, as many as in `block`; the seal)."""
        sealed = memoryview(self._cipher.encrypt(_nonce(index), block, self._identity))
        return sealed[: block.nbytes], bytes(sealed[block.nbytes :])

    def open(self, index: int, stored: memoryview, seal: bytes, out: memoryview) -> bool:
        """Writes the block's bytes into `out`. Returns False for a wrong seal."""
        try:
            opened = self._cipher.decrypt(_nonce(index), b"".join((stored, seal)), self._identity)
        except InvalidTag:
            return False
        out[:] = opened
        return True


def _nonce(index: int) -> bytes:
    return index.to_bytes(_NONCE_BYTES, "big")
