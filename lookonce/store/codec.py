"""The binary format of entries: packs rows into sealed bytes, parses them, and maps row ranges to byte ranges.

    entry    = header (4096 bytes) | row blocks
    header   = fixed fields (112 bytes) | block seals | zeros | file tags (at byte 3840) | zeros | header seal
    metadata = fixed fields (68 bytes)  | seal

All numbers are little-endian. A block is a whole number of rows, about 1 MiB. The header seal covers all bytes before
it, the key included, so a value of another key, an older writer or another generation is not mistaken for this one.
The file tags are two fields of 32 bytes, with zeros for a tag that is absent or not known.
Seals are checksums, which detect accidents, or with a key file AES-GCM, which also prevents reading and forgery
(sealing.py). A record states its kind of seal, and a reader accepts only its own kind. This module does no I/O.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.store.redis.miss_reason import CorruptEntryError, MissReason
from lookonce.store.sealing import BlockCipher, Sealer

HEADER_BYTES = 4096
KEY_BYTES = 32
FILE_TAG_BYTES = 32
MAX_FILE_TAGS = 2
# The offset does not depend on the kind of seal, so that operators' calls can read tags without a key file. The longest
# header seal fits behind them.
FILE_TAGS_OFFSET = HEADER_BYTES - 256
NONCE_BYTES = 16
FORMAT_VERSION = 1
BLOCK_TARGET_BYTES = 1 << 20
# Redis' default limit for one string (proto-max-bulk-len).
MAX_ENTRY_BYTES = 512 << 20

_ENTRY_MAGIC = b"LOOKONCE"
_METADATA_MAGIC = b"LKNCMETA"
# Magic, format version, seal kind, key. Both records begin with these, so readers of all versions can tell them apart.
_PREAMBLE = struct.Struct("<8sHH32s")
# Dtype, rows, hidden size, levels, image width, image height.
_SHAPE = struct.Struct("<B3xIIIII")
# Row bytes, rows per block, blocks, payload bytes, writer nonce, creation time.
_LAYOUT = struct.Struct("<IIIQ16sQ")

_LAYOUT_OFFSET = _PREAMBLE.size + _SHAPE.size
_SEALS_OFFSET = _LAYOUT_OFFSET + _LAYOUT.size

_DTYPE_CODES = {RowDtype.FLOAT32: 1, RowDtype.FLOAT16: 2, RowDtype.BFLOAT16: 3, RowDtype.INT8_SCALED: 4}
_DTYPES = {code: dtype for dtype, code in _DTYPE_CODES.items()}


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Division of an entry's rows into blocks."""

    num_rows: int
    row_bytes: int
    # Rows in each block but the last.
    block_rows: int

    def block_bytes(self, index: int) -> int:
        """Returns the size of block `index`; the last one may be shorter."""
        return min(self.block_rows, self.num_rows - index * self.block_rows) * self.row_bytes


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """The verified header of an entry, its first 4096 bytes."""

    meta: EmbeddingMeta
    layout: BlockLayout
    # Identifies the write that made this entry. A reader never mixes rows of two writes.
    nonce: bytes
    # Time of the write, seconds since 1970 by the writer's clock. For people; nothing depends on it.
    created_s: int
    # Seal of each block.
    seals: tuple[bytes, ...]
    # Verifies the blocks, and decrypts them with a key file.
    cipher: BlockCipher

    @property
    def entry_bytes(self) -> int:
        """Size of the whole entry, header included."""
        return HEADER_BYTES + self.meta.size_bytes


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """One block and the part of it that a row range needs."""

    # Position of the block in the entry.
    index: int
    # First byte of the block, counted from the start of the entry.
    offset: int
    # Size of the block, which can only be verified as a whole.
    length: int
    # Bytes before the first needed row.
    skip_bytes: int
    # Bytes of the needed rows.
    take_bytes: int


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """An entry ready to be written, in parts that are sent without joining them."""

    # Exactly HEADER_BYTES long.
    header: bytes
    # meta.size_bytes in total. With checksums these are views of the caller's rows.
    blocks: tuple[memoryview, ...]

    @property
    def size_bytes(self) -> int:
        """Total size of header and blocks."""
        return len(self.header) + sum(block.nbytes for block in self.blocks)


class EmbeddingCodec:
    """The entry format with one kind of seal."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer
        self._header_seal_offset = HEADER_BYTES - sealer.record_seal_bytes
        self.max_blocks = (FILE_TAGS_OFFSET - _SEALS_OFFSET) // sealer.block_seal_bytes
        self.metadata_bytes = _PREAMBLE.size + _SHAPE.size + sealer.record_seal_bytes

    def layout(self, num_rows: int, row_bytes: int) -> BlockLayout:
        """Returns the layout that `pack` uses: blocks of about 1 MiB, or larger if the header lacks room for seals."""
        by_size = max(1, BLOCK_TARGET_BYTES // row_bytes)
        by_seals = -(-num_rows // self.max_blocks)
        return BlockLayout(num_rows, row_bytes, min(num_rows, max(by_size, by_seals)))

    def pack(self, key: bytes, meta: EmbeddingMeta, rows: memoryview, nonce: bytes, created_s: int) -> PackedEntry:
        """Returns the entry of `rows`: `meta.size_bytes` contiguous bytes, [num_rows, (1 + num_levels) * hidden_size].

        `nonce` must not have been used before. Raises ValueError when key, nonce, shape or rows do not fit together.
        """
        rows = as_bytes(rows)
        if len(key) != KEY_BYTES or len(nonce) != NONCE_BYTES:
            raise ValueError(f"key and nonce must have {KEY_BYTES} and {NONCE_BYTES} bytes")
        if rows.nbytes != meta.size_bytes or rows.nbytes == 0:
            raise ValueError(f"rows have {rows.nbytes} bytes, their description says {meta.size_bytes}")
        if len(meta.file_tags) > MAX_FILE_TAGS or any(len(tag) != FILE_TAG_BYTES for tag in meta.file_tags):
            raise ValueError(f"an entry has at most {MAX_FILE_TAGS} file tags of {FILE_TAG_BYTES} bytes")
        layout = self.layout(meta.num_rows, meta.row_bytes)
        block_bytes = layout.block_bytes(0)
        num_blocks = -(-rows.nbytes // block_bytes)
        numbers = _LAYOUT.pack(meta.row_bytes, layout.block_rows, num_blocks, meta.size_bytes, nonce, created_s)
        fixed = self._pack_identity(_ENTRY_MAGIC, key, meta) + numbers
        cipher = self._sealer.blocks(0, fixed)
        parts = [rows[offset : offset + block_bytes] for offset in range(0, rows.nbytes, block_bytes)]
        blocks, seals = zip(*(cipher.seal(index, part) for index, part in enumerate(parts)), strict=True)
        header = (fixed + b"".join(seals)).ljust(FILE_TAGS_OFFSET, b"\0") + b"".join(meta.file_tags)
        return PackedEntry(self._sealed(header.ljust(self._header_seal_offset, b"\0")), blocks)

    def parse_header(self, data: bytes | memoryview, key: bytes) -> EntryHeader:
        """Verifies and parses the first HEADER_BYTES of an entry that was found under `key`.

        Raises CorruptEntryError, and nothing else, for every input that `pack` did not make for this key.
        """
        data = as_bytes(memoryview(data))
        if data.nbytes < HEADER_BYTES:
            raise CorruptEntryError(MissReason.TOO_SHORT)
        data = data[:HEADER_BYTES]
        meta, key_index = self._parse_identity(data, _ENTRY_MAGIC, key)
        row_bytes, block_rows, num_blocks, payload_bytes, nonce, created_s = _LAYOUT.unpack_from(data, _LAYOUT_OFFSET)
        is_shape_right = (row_bytes, payload_bytes) == (meta.row_bytes, meta.size_bytes) and block_rows >= 1
        if not is_shape_right or num_blocks > self.max_blocks or num_blocks != -(-meta.num_rows // block_rows):
            raise CorruptEntryError(MissReason.BAD_SHAPE)
        width = self._sealer.block_seal_bytes
        offsets = range(_SEALS_OFFSET, _SEALS_OFFSET + num_blocks * width, width)
        seals = tuple(bytes(data[offset : offset + width]) for offset in offsets)
        cipher = self._sealer.blocks(key_index, bytes(data[:_SEALS_OFFSET]))
        meta = replace(meta, file_tags=parse_file_tags(data[FILE_TAGS_OFFSET:]))
        return EntryHeader(meta, BlockLayout(meta.num_rows, row_bytes, block_rows), nonce, created_s, seals, cipher)

    def pack_metadata(self, key: bytes, meta: EmbeddingMeta) -> bytes:
        """Returns the record of `metadata_bytes` that describes an embedding without its rows."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key must have {KEY_BYTES} bytes")
        return self._sealed(self._pack_identity(_METADATA_MAGIC, key, meta))

    def parse_metadata(self, data: bytes | memoryview, key: bytes) -> EmbeddingMeta:
        """Reverses `pack_metadata`. Raises CorruptEntryError, and nothing else, for every other input."""
        data = as_bytes(memoryview(data))
        if data.nbytes != self.metadata_bytes:
            is_short = data.nbytes < self.metadata_bytes
            raise CorruptEntryError(MissReason.TOO_SHORT if is_short else MissReason.LENGTH)
        meta, _ = self._parse_identity(data, _METADATA_MAGIC, key)
        return meta

    def _pack_identity(self, magic: bytes, key: bytes, meta: EmbeddingMeta) -> bytes:
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
            raise ValueError(f"the shape does not fit 32 bits: {meta}") from error
        return _PREAMBLE.pack(magic, FORMAT_VERSION, self._sealer.kind, key) + shape

    def _parse_identity(self, data: memoryview, magic: bytes, key: bytes) -> tuple[EmbeddingMeta, int]:
        """Verifies a record that ends with its seal. Returns its shape and the index of the key that sealed it."""
        found_magic, version, seal_kind, found_key = _PREAMBLE.unpack_from(data)
        if found_magic != magic:
            raise CorruptEntryError(MissReason.BAD_MAGIC)
        if (version, seal_kind) != (FORMAT_VERSION, self._sealer.kind):
            raise CorruptEntryError(MissReason.OTHER_VERSION)
        seal_offset = data.nbytes - self._sealer.record_seal_bytes
        key_index = self._sealer.key_of_record(data[:seal_offset], bytes(data[seal_offset:]))
        if key_index is None:
            raise CorruptEntryError(MissReason.HEADER_SEAL)
        if found_key != key:
            raise CorruptEntryError(MissReason.WRONG_KEY)
        code, num_rows, hidden_size, num_levels, image_width, image_height = _SHAPE.unpack_from(data, _PREAMBLE.size)
        if code not in _DTYPES or num_rows < 1 or hidden_size < 1:
            raise CorruptEntryError(MissReason.BAD_SHAPE)
        return EmbeddingMeta(num_rows, hidden_size, num_levels, _DTYPES[code], image_width, image_height), key_index

    def _sealed(self, data: bytes) -> bytes:
        return data + self._sealer.seal_record(data)


def parse_file_tags(data: bytes | memoryview) -> tuple[bytes, ...]:
    """Returns the tags at the start of `data`, the part of an entry from FILE_TAGS_OFFSET on; empty if not known."""
    fields = (bytes(data[at : at + FILE_TAG_BYTES]) for at in range(0, MAX_FILE_TAGS * FILE_TAG_BYTES, FILE_TAG_BYTES))
    return tuple(tag for tag in fields if len(tag) == FILE_TAG_BYTES and any(tag))


def check_length(header: EntryHeader, entry_bytes: int) -> None:
    """Raises CorruptEntryError unless a stored value has the length that its header states and Redis allows."""
    if entry_bytes != header.entry_bytes or entry_bytes > MAX_ENTRY_BYTES:
        raise CorruptEntryError(MissReason.LENGTH)


def block_span(layout: BlockLayout, start_row: int, stop_row: int) -> tuple[BlockSpan, ...]:
    """Returns the blocks that cover rows [start_row, stop_row), in order.

    Raises CorruptEntryError when the entry has no such rows, ValueError when the range itself is empty or reversed.
    """
    if not 0 <= start_row < stop_row:
        raise ValueError(f"rows [{start_row}, {stop_row}) are not a range")
    if stop_row > layout.num_rows:
        raise CorruptEntryError(MissReason.OTHER_SHAPE)
    first, last = start_row // layout.block_rows, (stop_row - 1) // layout.block_rows
    return tuple(_span_of_block(layout, index, start_row, stop_row) for index in range(first, last + 1))


def open_block(header: EntryHeader, index: int, stored: memoryview, out: memoryview) -> None:
    """Verifies block `index` and writes its bytes into `out`, which is large enough and may be `stored` itself.

    Raises CorruptEntryError unless `stored` is exactly what the header seals.
    """
    if stored.nbytes != header.layout.block_bytes(index):
        raise CorruptEntryError(MissReason.LENGTH)
    if not header.cipher.open(index, stored, header.seals[index], out):
        raise CorruptEntryError(MissReason.BLOCK_SEAL)


def as_bytes(view: memoryview) -> memoryview:
    """Returns a view of the same memory as unsigned bytes. Raises ValueError when it is not contiguous."""
    if not view.c_contiguous:
        raise ValueError("rows must be contiguous")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _span_of_block(layout: BlockLayout, index: int, start_row: int, stop_row: int) -> BlockSpan:
    first_row, row_bytes, length = index * layout.block_rows, layout.row_bytes, layout.block_bytes(index)
    skip_bytes = max(0, start_row - first_row) * row_bytes
    stop_bytes = min(length, (stop_row - first_row) * row_bytes)
    return BlockSpan(index, HEADER_BYTES + first_row * row_bytes, length, skip_bytes, stop_bytes - skip_bytes)
