"""Keys, shapes, rows and entries for tests of the store."""

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
from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.store import cache_names, codec
from lookonce.store.codec import EmbeddingCodec
from lookonce.store.embedding_store import EmbeddingStore, WriteOutcome
from lookonce.store.redis.exchange import Exchange
from lookonce.store.redis.miss_reason import CacheMissError, MissReason
from lookonce.store.sealing import Checksum

SMALL = EmbeddingMeta(7, 8, 1, RowDtype.BFLOAT16, 20, 10)
# Five blocks of 13 rows, 80 kB per row.
LARGE = EmbeddingMeta(60, 20_000, 0, RowDtype.FLOAT32, 640, 480)


def fresh_key() -> ContentKey:
    """Returns a key that no other test uses."""
    digest = image_digest(secrets.token_bytes(16))
    return content_key(digest, EncoderFingerprint("f" * 64), ProcessorOptions(), DEFAULT_TENANT)


def make_rows(meta: EmbeddingMeta, seed: int = 0) -> bytes:
    """Returns rows of this shape, equal for equal seeds."""
    return random.Random(seed).randbytes(meta.size_bytes)


def pack_entry(
    packer: EmbeddingCodec, key: bytes, meta: EmbeddingMeta, rows: bytes, nonce: bytes, created_s: int = 0
) -> bytes:
    """Returns the stored value of an entry, in one piece."""
    packed = packer.pack(key, meta, memoryview(rows), nonce, created_s=created_s)
    return packed.header + b"".join(packed.blocks)


def open_entry(reader: EmbeddingCodec, entry: bytes, start: int, stop: int, key: bytes) -> bytes:
    """Returns rows after a check of header, length and covering blocks. Raises CorruptEntryError."""
    header = reader.parse_header(memoryview(entry)[: codec.HEADER_BYTES], key)
    codec.check_length(header, len(entry))
    rows = b""
    for span in codec.block_span(header.layout, start, stop):
        block = memoryview(bytearray(entry[span.offset : span.offset + span.length]))
        codec.open_block(header, span.index, block, block)
        rows += bytes(block[span.skip_bytes : span.skip_bytes + span.take_bytes])
    return rows


def make_entry(key: ContentKey, meta: EmbeddingMeta, rows: bytes) -> bytes:
    """Returns the value that a writer would store, with a nonce of its own."""
    return pack_entry(EmbeddingCodec(Checksum()), key.value, meta, rows, secrets.token_bytes(16))


def data_key(key: ContentKey) -> str:
    """Returns the key of the rows as text."""
    return cache_names.data_key(key).decode()


def metadata_key(key: ContentKey) -> str:
    """Returns the key of the metadata as text."""
    return cache_names.metadata_key(key).decode()


def write(
    store: EmbeddingStore, key: ContentKey, meta: EmbeddingMeta, rows: memoryview, *, overwrite: bool = False
) -> bool:
    """Returns whether the store holds the entry afterwards, whoever wrote it."""
    return store.try_write(key, meta, rows, overwrite=overwrite) in (WriteOutcome.STORED, WriteOutcome.EXISTS)


def read(store: EmbeddingStore, key: ContentKey, meta: EmbeddingMeta, start: int, stop: int) -> bytes | MissReason:
    """Returns the rows, or the reason of the miss."""
    out = bytearray((stop - start) * meta.row_bytes)
    return store.read_rows(key, start, stop, memoryview(out)) or bytes(out)


def remove(store: EmbeddingStore, key: ContentKey) -> bool:
    """Removes rows and metadata through the store's own connections. Returns whether either existed."""

    def unlink(exchange: Exchange) -> bool:
        exchange.send(b"UNLINK", data_key(key).encode(), metadata_key(key).encode())
        return exchange.read_integer() > 0

    try:
        return store.ask(unlink, data_key(key).encode())
    except CacheMissError:
        return False


def read_all(store: EmbeddingStore, key: ContentKey) -> bytes | MissReason:
    """Returns all rows of a LARGE entry, or the reason of the miss."""
    return read(store, key, LARGE, 0, LARGE.num_rows)
