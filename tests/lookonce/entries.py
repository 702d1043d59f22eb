"""Keys, shapes and rows that tests of the store write and plant."""

from __future__ import annotations

import random
import secrets

from lookonce.content_key import (
    DEFAULT_TENANT,
    ContentKey,
    EncoderFingerprint,
    ProcessorOptions,
    content_key,
    image_digest,
)
from lookonce.embedding_codec import EmbeddingCodec
from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.embedding_store import EmbeddingStore
from lookonce.miss_reason import MissReason
from lookonce.sealing import Checksum

SMALL = EmbeddingMeta(7, 8, 1, RowDtype.BFLOAT16, 20, 10)
# 5 blocks, 13 rows of 80 kB each.
LARGE = EmbeddingMeta(60, 20_000, 0, RowDtype.FLOAT32, 640, 480)


def fresh_key() -> ContentKey:
    """A key that no other test has."""
    digest = image_digest(secrets.token_bytes(16))
    return content_key(digest, EncoderFingerprint("f" * 64), ProcessorOptions(), DEFAULT_TENANT)


def make_rows(meta: EmbeddingMeta, seed: int = 0) -> bytes:
    """Rows of this shape, the same for the same seed."""
    return random.Random(seed).randbytes(meta.size_bytes)


def make_entry(key: ContentKey, meta: EmbeddingMeta, rows: bytes) -> bytes:
    """The value that a writer would store, with a generation of its own."""
    packed = EmbeddingCodec(Checksum()).pack(key.value, meta, memoryview(rows), secrets.token_bytes(16), created_s=0)
    return packed.header + b"".join(packed.blocks)


def data_key(key: ContentKey) -> str:
    """Where the rows are stored."""
    return f"lookonce:{{{key.hex}}}:e"


def metadata_key(key: ContentKey) -> str:
    """Where the description is stored."""
    return f"lookonce:{{{key.hex}}}:m"


def read(store: EmbeddingStore, key: ContentKey, meta: EmbeddingMeta, start: int, stop: int) -> bytes | MissReason:
    """The rows, or why there are none."""
    out = bytearray((stop - start) * meta.row_bytes)
    return store.read_rows(key, start, stop, memoryview(out)) or bytes(out)


def read_all(store: EmbeddingStore, key: ContentKey) -> bytes | MissReason:
    """All rows of a LARGE entry."""
    return read(store, key, LARGE, 0, LARGE.num_rows)
