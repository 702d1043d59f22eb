"""Rows come back bit-equal, and every other input is a CorruptEntryError: never wrong rows, never another exception."""

from __future__ import annotations

import dataclasses
import mmap
import random
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.store import codec
from lookonce.store.redis.miss_reason import CorruptEntryError, MissReason
from lookonce.store.sealing import Checksum
from tests.lookonce.store.entries import open_entry, pack_entry

CODEC = codec.EmbeddingCodec(Checksum())
KEY = bytes(range(32))
OTHER_KEY = bytes(32)
NONCE = b"n" * codec.NONCE_BYTES

# Four blocks of 13 rows, 80 kB per row; the last block is shorter.
META = EmbeddingMeta(45, 20_000, 0, RowDtype.FLOAT32, 640, 480)
ROWS = random.Random(1).randbytes(META.size_bytes)
SMALL_META = EmbeddingMeta(7, 8, 1, RowDtype.BFLOAT16, 20, 10)
SMALL_ROWS = random.Random(2).randbytes(SMALL_META.size_bytes)


def make_entry(meta: EmbeddingMeta, rows: bytes, key: bytes = KEY, nonce: bytes = NONCE) -> bytes:
    return pack_entry(CODEC, key, meta, rows, nonce, created_s=1_700_000_000)


def read(entry: bytes, start: int, stop: int, key: bytes = KEY) -> bytes:
    return open_entry(CODEC, entry, start, stop, key)


def rows_of(meta: EmbeddingMeta, rows: bytes, start: int, stop: int) -> bytes:
    return rows[start * meta.row_bytes : stop * meta.row_bytes]


ENTRY = make_entry(META, ROWS)
SMALL_ENTRY = make_entry(SMALL_META, SMALL_ROWS)
# Rows of a second encode of the same image with other low bits, and of another image of the same shape.
OTHER_GENERATION = make_entry(META, random.Random(3).randbytes(META.size_bytes), nonce=b"o" * codec.NONCE_BYTES)
OTHER_IMAGE = make_entry(META, random.Random(4).randbytes(META.size_bytes), key=OTHER_KEY)

metas = st.builds(
    EmbeddingMeta,
    num_rows=st.integers(1, 60),
    hidden_size=st.integers(1, 64),
    num_levels=st.integers(0, 3),
    dtype=st.sampled_from(RowDtype),
    image_width=st.integers(1, 1 << 20),
    image_height=st.integers(1, 1 << 20),
)
ranges = st.integers(0, META.num_rows - 1).flatmap(
    lambda start: st.tuples(st.just(start), st.integers(start + 1, META.num_rows))
)


def reseal(record: bytearray) -> bytes:
    """Returns the record with a valid seal, as a writer with a bug would produce it."""
    record[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(record[:-8])))
    return bytes(record)


@given(meta=metas, data=st.data())
def test_any_shape_comes_back_bit_equal(meta: EmbeddingMeta, data: st.DataObject) -> None:
    rows = random.Random(data.draw(st.integers(0, 9))).randbytes(meta.size_bytes)
    entry = make_entry(meta, rows)
    header = CODEC.parse_header(entry[: codec.HEADER_BYTES], KEY)
    assert (header.meta, header.nonce, header.created_s) == (meta, NONCE, 1_700_000_000)
    assert header.entry_bytes == len(entry)
    start = data.draw(st.integers(0, meta.num_rows - 1))
    stop = data.draw(st.integers(start + 1, meta.num_rows))
    assert read(entry, start, stop) == rows_of(meta, rows, start, stop)


@given(wanted=ranges)
def test_any_range_over_several_blocks_comes_back_bit_equal(wanted: tuple[int, int]) -> None:
    assert read(ENTRY, *wanted) == rows_of(META, ROWS, *wanted)


def test_a_few_rows_touch_only_their_block() -> None:
    header = CODEC.parse_header(ENTRY[: codec.HEADER_BYTES], KEY)
    (span,) = codec.block_span(header.layout, 14, 16)
    assert (span.index, span.skip_bytes, span.take_bytes) == (1, META.row_bytes, 2 * META.row_bytes)
    assert span.length <= codec.BLOCK_TARGET_BYTES


@given(wanted=ranges, bit=st.integers(0, 8 * len(ENTRY) - 1))
def test_a_flipped_bit_is_noticed_or_lies_outside_the_rows(wanted: tuple[int, int], bit: int) -> None:
    damaged = bytearray(ENTRY)
    damaged[bit // 8] ^= 1 << (bit % 8)
    try:
        rows = read(bytes(damaged), *wanted)
    except CorruptEntryError:
        return
    assert rows == rows_of(META, ROWS, *wanted)


def test_every_flipped_bit_of_a_small_entry_is_noticed() -> None:
    for bit in range(8 * len(SMALL_ENTRY)):
        damaged = bytearray(SMALL_ENTRY)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(CorruptEntryError):
            read(bytes(damaged), 0, SMALL_META.num_rows)


@given(length=st.integers(0, len(ENTRY) - 1))
def test_a_truncated_entry_is_noticed(length: int) -> None:
    with pytest.raises(CorruptEntryError) as caught:
        read(ENTRY[:length], 0, 1)
    assert caught.value.reason is (MissReason.TOO_SHORT if length < codec.HEADER_BYTES else MissReason.LENGTH)


@given(extra=st.binary(min_size=1, max_size=5000))
def test_an_extended_entry_is_noticed(extra: bytes) -> None:
    with pytest.raises(CorruptEntryError) as caught:
        read(ENTRY + extra, 0, 1)
    assert caught.value.reason is MissReason.LENGTH


@given(
    other=st.sampled_from([OTHER_GENERATION, OTHER_IMAGE]),
    cuts=st.lists(st.integers(0, len(ENTRY)), min_size=2, max_size=2).map(sorted),
    wanted=ranges,
)
def test_a_splice_of_two_entries_never_gives_mixed_rows(other: bytes, cuts: list[int], wanted: tuple[int, int]) -> None:
    first, second = cuts
    spliced = ENTRY[:first] + other[first:second] + ENTRY[second:]
    try:
        rows = read(spliced, *wanted)
    except CorruptEntryError:
        return
    assert rows in (rows_of(META, ROWS, *wanted), rows_of(META, other[codec.HEADER_BYTES :], *wanted))


@pytest.mark.parametrize("length", [0, 1, 13 * META.row_bytes - 1, 13 * META.row_bytes + 1])
def test_a_block_of_another_length_is_noticed(length: int) -> None:
    header = CODEC.parse_header(ENTRY[: codec.HEADER_BYTES], KEY)
    with pytest.raises(CorruptEntryError) as caught:
        codec.open_block(header, 0, memoryview(ENTRY)[codec.HEADER_BYTES :][:length], memoryview(bytearray(length)))
    assert caught.value.reason is MissReason.LENGTH


def test_two_swapped_blocks_are_noticed() -> None:
    header = CODEC.parse_header(ENTRY[: codec.HEADER_BYTES], KEY)
    size = header.layout.block_bytes(0)
    blocks = [ENTRY[codec.HEADER_BYTES + index * size :][:size] for index in range(2)]
    swapped = ENTRY[: codec.HEADER_BYTES] + blocks[1] + blocks[0] + ENTRY[codec.HEADER_BYTES + 2 * size :]
    with pytest.raises(CorruptEntryError) as caught:
        read(swapped, 0, 1)
    assert caught.value.reason is MissReason.BLOCK_SEAL


@given(data=st.binary(max_size=9000))
def test_foreign_bytes_are_noticed(data: bytes) -> None:
    with pytest.raises(CorruptEntryError):
        CODEC.parse_header(data, KEY)
    with pytest.raises(CorruptEntryError):
        CODEC.parse_metadata(data, KEY)


def test_another_keys_entry_is_noticed() -> None:
    with pytest.raises(CorruptEntryError) as caught:
        CODEC.parse_header(OTHER_IMAGE[: codec.HEADER_BYTES], KEY)
    assert caught.value.reason is MissReason.WRONG_KEY


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_another_format_version_has_its_own_reason(version: int) -> None:
    header = bytearray(ENTRY[: codec.HEADER_BYTES])
    header[8:10] = struct.pack("<H", version)
    for data in (bytes(header), reseal(header)):
        with pytest.raises(CorruptEntryError) as caught:
            CODEC.parse_header(data, KEY)
        assert caught.value.reason is MissReason.OTHER_VERSION


@given(offset=st.integers(44, 111), value=st.binary(min_size=1, max_size=8))
def test_a_sealed_header_that_contradicts_itself_is_noticed_or_harmless(offset: int, value: bytes) -> None:
    header = bytearray(ENTRY[: codec.HEADER_BYTES])
    header[offset : offset + len(value)] = value
    del header[codec.HEADER_BYTES :]
    forged = reseal(header) + ENTRY[codec.HEADER_BYTES :]
    try:
        rows = read(forged, 0, 1)
    except CorruptEntryError:
        return
    assert ROWS.startswith(rows)


def test_a_range_beyond_the_rows_is_another_shape() -> None:
    header = CODEC.parse_header(ENTRY[: codec.HEADER_BYTES], KEY)
    with pytest.raises(CorruptEntryError) as caught:
        codec.block_span(header.layout, 44, 46)
    assert caught.value.reason is MissReason.OTHER_SHAPE


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (3, 3), (4, 3)])
def test_an_empty_or_reversed_range_is_a_value_error(start: int, stop: int) -> None:
    header = CODEC.parse_header(ENTRY[: codec.HEADER_BYTES], KEY)
    with pytest.raises(ValueError, match="not a range"):
        codec.block_span(header.layout, start, stop)


def test_a_giant_entry_gets_larger_blocks_instead_of_more_seals() -> None:
    meta = EmbeddingMeta(520, 1 << 18, 0, RowDtype.FLOAT32, 1, 1)
    # Untouched private pages: 520 MiB of zeros that take no memory.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, meta.size_bytes, flags=flags) as zeros, memoryview(zeros) as rows:
        header = CODEC.parse_header(CODEC.pack(KEY, meta, rows, NONCE, created_s=0).header, KEY)
    assert header.layout.block_rows == 2
    assert len(header.seals) == 260 <= CODEC.max_blocks


def test_pack_does_not_care_about_the_element_type_of_the_buffer() -> None:
    as_words = memoryview(SMALL_ROWS).cast("H")
    packed = CODEC.pack(KEY, SMALL_META, as_words, NONCE, created_s=1_700_000_000)
    assert packed.header == SMALL_ENTRY[: codec.HEADER_BYTES]


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": memoryview(SMALL_ROWS[:-1])},
        {"rows": memoryview(SMALL_ROWS + SMALL_ROWS)[::2]},
        {"rows": memoryview(b""), "meta": dataclasses.replace(SMALL_META, num_rows=0)},
        {"meta": dataclasses.replace(SMALL_META, image_width=1 << 32)},
        {"meta": dataclasses.replace(SMALL_META, image_height=-1)},
        {"key": KEY[:-1]},
        {"nonce": NONCE + b"n"},
    ],
)
def test_pack_refuses_parts_that_do_not_fit_together(changes: dict[str, object]) -> None:
    arguments = {"key": KEY, "meta": SMALL_META, "rows": memoryview(SMALL_ROWS), "nonce": NONCE, **changes}
    with pytest.raises(ValueError, match=r"must|have|fit"):
        CODEC.pack(created_s=0, **arguments)  # type: ignore[arg-type]


@given(meta=metas)
def test_metadata_comes_back_equal(meta: EmbeddingMeta) -> None:
    record = CODEC.pack_metadata(KEY, meta)
    assert len(record) == CODEC.metadata_bytes
    assert CODEC.parse_metadata(record, KEY) == meta


def test_every_damage_to_metadata_is_noticed() -> None:
    record = CODEC.pack_metadata(KEY, SMALL_META)
    damaged = [record[:length] for length in range(len(record))] + [record + b"\0"]
    for bit in range(8 * len(record)):
        flipped = bytearray(record)
        flipped[bit // 8] ^= 1 << (bit % 8)
        damaged.append(bytes(flipped))
    for data in damaged:
        with pytest.raises(CorruptEntryError):
            CODEC.parse_metadata(data, KEY)


def test_metadata_of_another_key_and_an_entry_are_no_metadata() -> None:
    for data, reason in (
        (CODEC.pack_metadata(OTHER_KEY, SMALL_META), MissReason.WRONG_KEY),
        (SMALL_ENTRY[: CODEC.metadata_bytes], MissReason.BAD_MAGIC),
    ):
        with pytest.raises(CorruptEntryError) as caught:
            CODEC.parse_metadata(data, KEY)
        assert caught.value.reason is reason
