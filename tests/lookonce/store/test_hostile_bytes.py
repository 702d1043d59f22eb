"""Whatever bytes are under a key, a read returns exactly the rows that were written, or a miss with a reason.

The tests state the guarantees of each seal, on 10,000 values. With checksums no accidental damage is accepted as rows,
and a forger who knows the format can have his own rows accepted but cannot move ours. With AES-GCM nothing is accepted
that was sealed without the key.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.content_key import ContentKey
from lookonce.embedding_meta import EmbeddingMeta
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store import codec as embedding_codec
from lookonce.store.codec import HEADER_BYTES, EmbeddingCodec
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.redis.miss_reason import MissReason
from lookonce.store.sealing import AesGcm, Checksum, Sealer
from tests.lookonce.store.damage import damaged
from tests.lookonce.store.entries import data_key, fresh_key, metadata_key, pack_entry, write
from tests.lookonce.store.forgery import METADATA_BYTES, changed_fields, forged_entries, forged_headers, reseal
from tests.lookonce.store.planted import (
    ABSENT,
    BLOCK_BYTES,
    CORRUPT,
    META,
    OLDER_ROWS,
    ROWS,
    Image,
    Question,
    Tally,
    question_about,
)

CHECKSUM, OURS, STRANGERS = Checksum(), AesGcm([b"o" * 32]), AesGcm([b"s" * 32])
SEALERS = [pytest.param(CHECKSUM, id="checksum"), pytest.param(OURS, id="aes-gcm")]

# Reasons that damage leads to. The other reasons need somebody who reseals the value.
BY_DAMAGE = CORRUPT - {MissReason.BAD_SHAPE, MissReason.OTHER_SHAPE}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes writers use blocks of four rows instead of a mebibyte; readers follow the header."""
    monkeypatch.setattr(embedding_codec, "BLOCK_TARGET_BYTES", BLOCK_BYTES)


@pytest.fixture
def make_image(
    shared_redis: EmbeddedRedis, shared_admin: Any, make_store: Callable[..., EmbeddingStore]
) -> Callable[[Sealer], Image]:
    """`make_image(sealer)` returns an image whose values a store wrote into a real server."""

    def make(sealer: Sealer) -> Image:
        store, key = make_store(shared_redis.url, budget_s=10.0, sealer=sealer), fresh_key()

        def written(key: ContentKey, meta: EmbeddingMeta, rows: bytes) -> tuple[bytes, bytes]:
            assert write(store, key, meta, memoryview(rows))
            values = shared_admin.get(data_key(key)), shared_admin.get(metadata_key(key))
            shared_admin.delete(data_key(key), metadata_key(key))
            return values

        older, _ = written(key, META, OLDER_ROWS)
        entry, record = written(key, META, ROWS)
        short = replace(META, num_rows=11)
        others = written(fresh_key(), META, ROWS), written(fresh_key(), short, ROWS[: short.size_bytes])
        strangers = [EmbeddingCodec(each) for each in (CHECKSUM, OURS, STRANGERS) if each is not sealer]
        foreign = [pack_entry(codec, key.value, META, OLDER_ROWS, b"n" * 16) for codec in strangers]
        records = [codec.pack_metadata(key.value, short) for codec in strangers]
        return Image(
            store,
            shared_admin,
            key,
            entry,
            record,
            older,
            (*(entry for entry, _ in others), *foreign),
            (*(record for _, record in others), *records, entry),
        )

    return make


def for_each_of(num_values: int, values: st.SearchStrategy[bytes], check: Callable[[bytes], None]) -> None:
    """Runs `check` on `num_values` different values that Hypothesis draws, the same ones in every run."""
    seen: set[bytes] = set()

    # Different choices of Hypothesis often produce the same value.
    @settings(max_examples=2 * num_values, derandomize=True, database=None)
    @given(values)
    def run(value: bytes) -> None:
        if value not in seen and len(seen) < num_values:
            seen.add(value)
            check(value)

    run()
    assert len(seen) == num_values


def for_each_damaged(
    num_values: int, value: bytes, others: Sequence[bytes], block_bytes: int, check: Callable[[bytes], None]
) -> None:
    """Runs `check` on `num_values` different damaged forms of a value, the same ones in every run."""
    rng = random.Random(num_values)
    seen: set[bytes] = set()
    while len(seen) < num_values:
        found = damaged(rng, value, others, block_bytes)
        if found not in seen:
            seen.add(found)
            check(found)


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sealer", SEALERS)
def test_damaged_entries_give_the_rows_or_a_miss_with_a_reason(
    make_image: Callable[[Sealer], Image], sealer: Sealer
) -> None:
    image = make_image(sealer)
    tally = Tally(image)
    # An entry from another write of this image is not damaged. Its rows are valid, but must not be mixed with others.
    writes = {image.entry: ROWS, image.older: OLDER_ROWS}
    # A partial range belongs to the write of the header if its blocks are from that write, too.
    rows_under = {entry[:HEADER_BYTES]: rows for entry, rows in writes.items()}

    def check(value: bytes) -> None:
        question = question_about(value)
        found = tally.read(value, question)
        if found is None:
            assert value not in writes
        else:
            assert value[:HEADER_BYTES] in rows_under, "a damaged header was believed"
            assert found == question.rows_of(rows_under[value[:HEADER_BYTES]])
            assert value in writes or not question.wants_all, "all rows of a damaged entry were believed"
        if question.knows_size:
            meta = tally.describe("stat", data_key(image.key), value, image.store.stat)
            assert meta == (META if value[:HEADER_BYTES] in rows_under and len(value) == len(image.entry) else None)

    for_each_damaged(3500, image.entry, [image.older, *image.foreign], BLOCK_BYTES, check)
    tally.check()
    assert tally.reasons == BY_DAMAGE | ABSENT


@pytest.mark.parametrize("sealer", SEALERS)
def test_damaged_metadata_gives_the_shape_or_a_miss_with_a_reason(
    make_image: Callable[[Sealer], Image], sealer: Sealer
) -> None:
    image = make_image(sealer)
    tally = Tally(image)

    def check(value: bytes) -> None:
        meta = tally.describe("metadata", metadata_key(image.key), value, image.store.metadata)
        assert meta == (META if value == image.record else None)

    for_each_damaged(900, image.record, image.foreign_records, METADATA_BYTES, check)
    tally.check()
    assert tally.reasons == (BY_DAMAGE - {MissReason.BLOCK_SEAL}) | ABSENT


def test_an_empty_value_does_not_keep_an_image_out_of_the_cache(make_image: Callable[[Sealer], Image]) -> None:
    image = make_image(CHECKSUM)
    image.admin.set(data_key(image.key), b"")
    assert write(image.store, image.key, META, memoryview(ROWS))
    assert image.read(Question(0, META.num_rows, knows_size=False)) == ROWS


# --- forgery --------------------------------------------------------------------------------------------------------


def test_a_forged_header_with_a_valid_checksum_moves_no_row(make_image: Callable[[Sealer], Image]) -> None:
    image = make_image(CHECKSUM)
    tally = Tally(image)

    def check(value: bytes) -> None:
        question = question_about(value)
        assert tally.read(value, question) in (None, question.rows_of(ROWS))

    for_each_of(300, forged_headers(image.entry, CHECKSUM), check)
    tally.check()
    assert tally.reasons >= CORRUPT - {MissReason.TOO_SHORT, MissReason.HEADER_SEAL, MissReason.OTHER_SHAPE}


def test_entries_forged_under_a_checksum_give_the_forgers_rows_only(
    make_image: Callable[[Sealer], Image],
) -> None:
    """A limit of checksums, which need no secret. A key file prevents this."""
    image = make_image(CHECKSUM)
    tally = Tally(image)

    def check(value: bytes) -> None:
        question = question_about(value)
        assert tally.read(value, question) in (None, question.rows_of(value[HEADER_BYTES:]))

    for_each_of(200, forged_entries(image.key, META, [CHECKSUM]), check)
    tally.check()
    assert tally.counts["read_rows", "ok"] >= 20
    assert tally.reasons == {MissReason.OTHER_SHAPE}


def test_no_forgery_is_accepted_under_aes_gcm(make_image: Callable[[Sealer], Image]) -> None:
    image = make_image(OURS)
    tally = Tally(image)

    def check(value: bytes) -> None:
        assert tally.read(value, question_about(value)) is None
        assert tally.describe("stat", data_key(image.key), value, image.store.stat) is None

    outsiders: list[Sealer] = [CHECKSUM, STRANGERS]
    forged = st.sampled_from(outsiders).flatmap(lambda sealer: forged_headers(image.entry, sealer))
    in_disguise = forged_entries(image.key, META, outsiders).map(
        lambda entry: (
            reseal(entry[:10] + OURS.kind.to_bytes(2, "little") + entry[12:HEADER_BYTES], STRANGERS)
            + entry[HEADER_BYTES:]
        )
    )
    for_each_of(500, forged | forged_entries(image.key, META, outsiders) | in_disguise, check)
    tally.check()
    assert tally.reasons == {MissReason.BAD_MAGIC, MissReason.OTHER_VERSION, MissReason.HEADER_SEAL}


@pytest.mark.parametrize("sealer", SEALERS)
def test_forged_metadata_is_accepted_under_a_checksum_only(
    make_image: Callable[[Sealer], Image], sealer: Sealer
) -> None:
    image = make_image(sealer)
    tally = Tally(image)

    def check(value: bytes) -> None:
        meta = tally.describe("metadata", metadata_key(image.key), value, image.store.metadata)
        if sealer is OURS or value[:44] != image.record[:44]:
            assert meta is None
        elif meta is not None:
            assert (meta.num_rows, meta.hidden_size) == struct.unpack_from("<II", value, 48)

    outsider = CHECKSUM if sealer is CHECKSUM else STRANGERS
    for_each_of(200, changed_fields(image.record, METADATA_BYTES).map(lambda record: reseal(record, outsider)), check)
    tally.check()
