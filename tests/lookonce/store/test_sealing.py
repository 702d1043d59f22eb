"""Sealed entries: rows can be read with the key, and neither read, swapped nor forged without it."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.errors import ConfigurationError
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store import codec
from lookonce.store.codec import EmbeddingCodec
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.miss_reason import CorruptEntryError, MissReason
from lookonce.store.sealing import AesGcm, Checksum, Sealer, load_sealer
from tests.lookonce.store.entries import (
    LARGE,
    data_key,
    fresh_key,
    make_rows,
    metadata_key,
    open_entry,
    pack_entry,
    read,
    read_all,
    write,
)

KEY_A, KEY_B = b"a" * 32, b"b" * 32
SEALED = EmbeddingCodec(AesGcm([KEY_A]))
CONTENT_KEY, OTHER_CONTENT_KEY = bytes(range(32)), bytes(32)
# Three blocks of 13 rows, 80 kB per row; the last block is shorter.
META = EmbeddingMeta(30, 20_000, 0, RowDtype.FLOAT32, 640, 480)
ROWS = random.Random(1).randbytes(META.size_bytes)
SMALL_META = EmbeddingMeta(3, 8, 0, RowDtype.BFLOAT16, 20, 10)
SMALL_ROWS = random.Random(2).randbytes(SMALL_META.size_bytes)


def entry_of(
    packer: EmbeddingCodec, meta: EmbeddingMeta, rows: bytes, key: bytes = CONTENT_KEY, nonce: bytes = b"n" * 16
) -> bytes:
    return pack_entry(packer, key, meta, rows, nonce)


ENTRY = entry_of(SEALED, META, ROWS)
SMALL_ENTRY = entry_of(SEALED, SMALL_META, SMALL_ROWS)


def refusal(reader: EmbeddingCodec, entry: bytes, key: bytes = CONTENT_KEY) -> MissReason:
    with pytest.raises(CorruptEntryError) as caught:
        open_entry(reader, entry, 0, 1, key)
    return caught.value.reason


@given(st.integers(0, 29).flatmap(lambda start: st.tuples(st.just(start), st.integers(start + 1, 30))))
def test_any_range_comes_back_bit_equal(wanted: tuple[int, int]) -> None:
    start, stop = wanted
    assert open_entry(SEALED, ENTRY, start, stop, CONTENT_KEY) == ROWS[start * META.row_bytes : stop * META.row_bytes]


def test_the_rows_cannot_be_read_without_the_key() -> None:
    assert len(ENTRY) == codec.HEADER_BYTES + len(ROWS)
    for offset in range(0, len(ROWS) - 16, 4096):
        assert ROWS[offset : offset + 16] not in ENTRY
    assert refusal(EmbeddingCodec(AesGcm([KEY_B])), ENTRY) is MissReason.HEADER_SEAL


def test_the_same_rows_look_different_each_time() -> None:
    again = entry_of(SEALED, META, ROWS, nonce=b"o" * 16)
    assert again[codec.HEADER_BYTES :] != ENTRY[codec.HEADER_BYTES :]


def test_every_flipped_bit_is_noticed() -> None:
    for bit in range(8 * len(SMALL_ENTRY)):
        damaged = bytearray(SMALL_ENTRY)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(CorruptEntryError):
            open_entry(SEALED, bytes(damaged), 0, SMALL_META.num_rows, CONTENT_KEY)


def test_another_image_s_entry_cannot_be_put_in_its_place() -> None:
    other = entry_of(SEALED, META, ROWS, key=OTHER_CONTENT_KEY)
    assert refusal(SEALED, other) is MissReason.WRONG_KEY
    renamed = bytearray(other)
    renamed[12:44] = CONTENT_KEY
    assert refusal(SEALED, bytes(renamed)) is MissReason.HEADER_SEAL


def test_blocks_cannot_change_places_or_entries() -> None:
    size = 13 * META.row_bytes
    first, second = (ENTRY[codec.HEADER_BYTES + index * size :][:size] for index in range(2))
    rest = ENTRY[codec.HEADER_BYTES + 2 * size :]
    assert refusal(SEALED, ENTRY[: codec.HEADER_BYTES] + second + first + rest) is MissReason.BLOCK_SEAL
    other = entry_of(SEALED, META, ROWS, nonce=b"o" * 16)
    assert refusal(SEALED, ENTRY[: codec.HEADER_BYTES] + other[codec.HEADER_BYTES :]) is MissReason.BLOCK_SEAL


def test_checksums_and_aes_gcm_do_not_accept_each_others_entries() -> None:
    plain = EmbeddingCodec(Checksum())
    assert refusal(SEALED, entry_of(plain, META, ROWS)) is MissReason.OTHER_VERSION
    assert refusal(plain, ENTRY) is MissReason.OTHER_VERSION


def test_metadata_is_sealed_too() -> None:
    record = SEALED.pack_metadata(CONTENT_KEY, SMALL_META)
    assert SEALED.parse_metadata(record, CONTENT_KEY) == SMALL_META
    for bit in range(8 * len(record)):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(CorruptEntryError):
            SEALED.parse_metadata(bytes(damaged), CONTENT_KEY)


def test_after_a_key_rotation_old_entries_still_open() -> None:
    rotated, new_only = EmbeddingCodec(AesGcm([KEY_B, KEY_A])), EmbeddingCodec(AesGcm([KEY_B]))
    assert open_entry(rotated, ENTRY, 0, 30, CONTENT_KEY) == ROWS
    fresh = entry_of(rotated, META, ROWS)
    assert open_entry(new_only, fresh, 0, 30, CONTENT_KEY) == ROWS
    assert refusal(SEALED, fresh) is MissReason.HEADER_SEAL


def test_a_key_file_has_a_key_per_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{KEY_B.hex()}\n{KEY_A.hex()}\n")
    assert open_entry(EmbeddingCodec(load_sealer(path)), ENTRY, 0, 30, CONTENT_KEY) == ROWS
    assert isinstance(load_sealer(None), Checksum)


@pytest.mark.parametrize("text", ["", "abc", "zz" * 32, "ab" * 31, "ab" * 33, "\xe4" * 64, f"{'ab' * 32}\n" * 9])
def test_a_malformed_key_file_is_refused_without_showing_its_content(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigurationError, match="seal") as caught:
        load_sealer(path)
    assert not text or text[:64] not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigurationError, match="readable"):
        load_sealer(tmp_path / "nowhere")


@pytest.mark.parametrize("sealer", [Checksum(), AesGcm([KEY_A])])
def test_rows_travel_through_a_real_cache(
    shared_redis: EmbeddedRedis,
    shared_admin: Any,
    make_store: Callable[..., EmbeddingStore],
    sealer: Sealer,
) -> None:
    store, key, rows = make_store(shared_redis.url, sealer=sealer), fresh_key(), make_rows(LARGE)
    assert write(store, key, LARGE, memoryview(rows))
    assert read_all(store, key) == rows
    assert read(store, key, LARGE, 12, 27) == rows[12 * LARGE.row_bytes : 27 * LARGE.row_bytes]
    assert store.stat(key) == store.metadata(key) == LARGE
    # A value of another key of the same cache, a damaged one, and a reader without the key.
    offset = codec.HEADER_BYTES + 17
    (byte,) = shared_admin.getrange(data_key(key), offset, offset)
    shared_admin.setrange(data_key(key), offset, bytes([byte ^ 1]))
    assert read_all(store, key) is MissReason.BLOCK_SEAL
    assert not shared_admin.exists(data_key(key))
    stranger = make_store(shared_redis.url, sealer=AesGcm([KEY_B]))
    assert write(store, key, LARGE, memoryview(rows))
    assert stranger.metadata(key) is None
    assert not shared_admin.exists(metadata_key(key))
