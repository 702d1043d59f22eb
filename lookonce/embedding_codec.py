"""Rows ⇄ self-describing sealed bytes, and row range → byte ranges. Does no I/O.

    entry    = header (4096 bytes) | row blocks
    header   = fixed fields (112 bytes) | block seals (8 bytes each) | zeros | header seal (8 bytes)
    metadata = fixed fields (68 bytes)  | seal (8 bytes)

Everything is little-endian. A block is a whole number of rows, about 1 MiB; its seal is the XXH3-64 of its bytes. The
header seal covers all bytes before it, the key included, so a value that belongs to another key, an older writer or
another generation cannot be taken for this one. Seals detect accidents, not forgery.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.miss_reason import CorruptEntryError, MissReason

HEADER_BYTES = 4096
KEY_BYTES = 32
NONCE_BYTES = 16
FORMAT_VERSION = 1
BLOCK_TARGET_BYTES = 1 << 20

_ENTRY_MAGIC = b"LOOKONCE"
_METADATA_MAGIC = b"LKNCMETA"
# magic, format version, seal kind, key: the same in both records, so that a reader of any version can tell them apart.
_PREAMBLE = struct.Struct("<8sHH32s")
# dtype, rows, hidden size, levels, image width, image height.
_SHAPE = struct.Struct("<B3xIIIII")
# row bytes, rows per block, blocks, payload bytes, writer nonce, creation time.
_LAYOUT = struct.Struct("<IIIQ16sQ")
_SEAL = struct.Struct("<Q")
_SEAL_KIND_XXH3 = 1

_LAYOUT_OFFSET = _PREAMBLE.size + _SHAPE.size
_SEALS_OFFSET = _LAYOUT_OFFSET + _LAYOUT.size
_HEADER_SEAL_OFFSET = HEADER_BYTES - _SEAL.size
MAX_BLOCKS = (_HEADER_SEAL_OFFSET - _SEALS_OFFSET) // _SEAL.size
METADATA_BYTES = _PREAMBLE.size + _SHAPE.size + _SEAL.size

_DTYPE_CODES = {RowDtype.FLOAT32: 1, RowDtype.FLOAT16: 2, RowDtype.BFLOAT16: 3}
_DTYPES = {code: dtype for dtype, code in _DTYPE_CODES.items()}


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """The first 4096 bytes of an entry, checked."""

    meta: EmbeddingMeta
    # Rows of every block but the last.
    block_rows: int
    # Names the write that made this entry; a reader never mixes two of them.
    nonce: bytes
    # When it was written, seconds since 1970 by the writer's clock. For people; nothing depends on it.
    created_s: int
    # XXH3-64 of each block.
    seals: tuple[int, ...]

    @property
    def entry_bytes(self) -> int:
        """Bytes of the whole entry, header included."""
        return HEADER_BYTES + self.meta.size_bytes

    def block_bytes(self, index: int) -> int:
        """Bytes of block `index`; the last one may be shorter."""
        num_rows = min(self.block_rows, self.meta.num_rows - index * self.block_rows)
        return num_rows * self.meta.row_bytes


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """One block and the part of it that a row range needs."""

    # Position of the block in the entry.
    index: int
    # First byte of the block, counted from the start of the entry.
    offset: int
    # Bytes of the whole block; it can only be verified as a whole.
    length: int
    # Bytes before the first needed row.
    skip_bytes: int
    # Bytes of the needed rows.
    take_bytes: int


def pack(key: bytes, meta: EmbeddingMeta, rows: memoryview, nonce: bytes, created_s: int) -> bytes:
    """The 4096 header bytes of an entry; `rows` follows them as it is and is not copied.

    `rows` holds `meta.size_bytes` contiguous bytes, [num_rows, (1 + num_levels) * hidden_size] in `meta.dtype`.
    Raises ValueError when key, nonce, shape or rows do not fit together.
    """
    rows = as_bytes(rows)
    if len(key) != KEY_BYTES or len(nonce) != NONCE_BYTES:
        raise ValueError(f"key and nonce must have {KEY_BYTES} and {NONCE_BYTES} bytes")
    if rows.nbytes != meta.size_bytes or rows.nbytes == 0:
        raise ValueError(f"rows have {rows.nbytes} bytes, their description says {meta.size_bytes}")
    block_rows = _choose_block_rows(meta)
    block_bytes = block_rows * meta.row_bytes
    seals = [_seal(rows[offset : offset + block_bytes]) for offset in range(0, rows.nbytes, block_bytes)]
    layout = _LAYOUT.pack(meta.row_bytes, block_rows, len(seals), meta.size_bytes, nonce, created_s)
    fixed = _pack_identity(_ENTRY_MAGIC, key, meta) + layout
    return _sealed((fixed + b"".join(map(_SEAL.pack, seals))).ljust(_HEADER_SEAL_OFFSET, b"\0"))


def parse_header(data: bytes | memoryview, key: bytes) -> EntryHeader:
    """Checks the first HEADER_BYTES of an entry that was found under `key`.

    Raises CorruptEntryError, and nothing else, for every input that `pack` did not make for this key.
    """
    data = as_bytes(memoryview(data))
    if data.nbytes < HEADER_BYTES:
        raise CorruptEntryError(MissReason.TOO_SHORT)
    data = data[:HEADER_BYTES]
    meta = _parse_identity(data, _ENTRY_MAGIC, key)
    row_bytes, block_rows, num_blocks, payload_bytes, nonce, created_s = _LAYOUT.unpack_from(data, _LAYOUT_OFFSET)
    if (row_bytes, payload_bytes) != (meta.row_bytes, meta.size_bytes) or block_rows < 1 or num_blocks > MAX_BLOCKS:
        raise CorruptEntryError(MissReason.BAD_SHAPE)
    if num_blocks != -(-meta.num_rows // block_rows):
        raise CorruptEntryError(MissReason.BAD_SHAPE)
    seals = struct.unpack_from(f"<{num_blocks}Q", data, _SEALS_OFFSET)
    return EntryHeader(meta, block_rows, nonce, created_s, seals)


def check_length(header: EntryHeader, entry_bytes: int) -> None:
    """Raises CorruptEntryError when a stored value is shorter or longer than its header says."""
    if entry_bytes != header.entry_bytes:
        raise CorruptEntryError(MissReason.LENGTH)


def block_span(header: EntryHeader, start_row: int, stop_row: int) -> tuple[BlockSpan, ...]:
    """The blocks that cover rows [start_row, stop_row), in order.

    Raises CorruptEntryError when the entry has no such rows, ValueError when the range itself is empty or reversed.
    """
    if not 0 <= start_row < stop_row:
        raise ValueError(f"rows [{start_row}, {stop_row}) are not a range")
    if stop_row > header.meta.num_rows:
        raise CorruptEntryError(MissReason.OTHER_SHAPE)
    first, last = start_row // header.block_rows, (stop_row - 1) // header.block_rows
    return tuple(_span_of_block(header, index, start_row, stop_row) for index in range(first, last + 1))


def verify_block(header: EntryHeader, index: int, block: memoryview) -> None:
    """Raises CorruptEntryError unless `block` holds exactly the bytes of block `index` that the header seals."""
    if block.nbytes != header.block_bytes(index):
        raise CorruptEntryError(MissReason.LENGTH)
    if _seal(block) != header.seals[index]:
        raise CorruptEntryError(MissReason.BLOCK_SEAL)


def pack_metadata(key: bytes, meta: EmbeddingMeta) -> bytes:
    """The METADATA_BYTES that describe an embedding without its rows."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key must have {KEY_BYTES} bytes")
    return _sealed(_pack_identity(_METADATA_MAGIC, key, meta))


def parse_metadata(data: bytes | memoryview, key: bytes) -> EmbeddingMeta:
    """Reverses `pack_metadata`. Raises CorruptEntryError, and nothing else, for every other input."""
    data = as_bytes(memoryview(data))
    if data.nbytes != METADATA_BYTES:
        raise CorruptEntryError(MissReason.TOO_SHORT if data.nbytes < METADATA_BYTES else MissReason.LENGTH)
    return _parse_identity(data, _METADATA_MAGIC, key)


def as_bytes(view: memoryview) -> memoryview:
    """The same memory as unsigned bytes. Raises ValueError when it is not contiguous."""
    if not view.c_contiguous:
        raise ValueError("rows must be contiguous")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _choose_block_rows(meta: EmbeddingMeta) -> int:
    """About 1 MiB of whole rows, or more where that would need more seals than the header holds."""
    by_size = max(1, BLOCK_TARGET_BYTES // meta.row_bytes)
    by_seals = -(-meta.num_rows // MAX_BLOCKS)
    return min(meta.num_rows, max(by_size, by_seals))


def _span_of_block(header: EntryHeader, index: int, start_row: int, stop_row: int) -> BlockSpan:
    first_row, row_bytes, length = index * header.block_rows, header.meta.row_bytes, header.block_bytes(index)
    skip_bytes = max(0, start_row - first_row) * row_bytes
    stop_bytes = min(length, (stop_row - first_row) * row_bytes)
    return BlockSpan(index, HEADER_BYTES + first_row * row_bytes, length, skip_bytes, stop_bytes - skip_bytes)


def _pack_identity(magic: bytes, key: bytes, meta: EmbeddingMeta) -> bytes:
    try:
        shape = _SHAPE.pack(
            _DTYPE_CODES[meta.dtype],
            meta.num_rows,
            meta.hidden_size,
            meta.num_levels,
            meta.image_width,
            meta.image_height,
        )
    except struct.error as error:
        raise ValueError(f"a shape that does not fit 32 bits: {meta}") from error
    return _PREAMBLE.pack(magic, FORMAT_VERSION, _SEAL_KIND_XXH3, key) + shape


def _parse_identity(data: memoryview, magic: bytes, key: bytes) -> EmbeddingMeta:
    """Magic, version, seal and key of a record whose last 8 bytes are its seal; then its shape."""
    found_magic, version, seal_kind, found_key = _PREAMBLE.unpack_from(data)
    if found_magic != magic:
        raise CorruptEntryError(MissReason.BAD_MAGIC)
    if (version, seal_kind) != (FORMAT_VERSION, _SEAL_KIND_XXH3):
        raise CorruptEntryError(MissReason.OTHER_VERSION)
    if _seal(data[: -_SEAL.size]) != _SEAL.unpack(data[-_SEAL.size :])[0]:
        raise CorruptEntryError(MissReason.HEADER_SEAL)
    if found_key != key:
        raise CorruptEntryError(MissReason.WRONG_KEY)
    code, num_rows, hidden_size, num_levels, image_width, image_height = _SHAPE.unpack_from(data, _PREAMBLE.size)
    if code not in _DTYPES or num_rows < 1 or hidden_size < 1:
        raise CorruptEntryError(MissReason.BAD_SHAPE)
    return EmbeddingMeta(num_rows, hidden_size, num_levels, _DTYPES[code], image_width, image_height)


def _sealed(data: bytes) -> bytes:
    return data + _SEAL.pack(_seal(memoryview(data)))


def _seal(data: memoryview) -> int:
    seal: int = xxhash.xxh3_64_intdigest(data)
    return seal
