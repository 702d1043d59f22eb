"""Encrypted blocks come back as they were, and a changed one does not come back."""

from __future__ import annotations

import pytest

from lookonce.store.gcm_blocks import GcmBlocks

KEY, IDENTITY, BLOCK = bytes(range(32)), b"entry", bytes(range(256)) * 10


def test_a_block_is_opened_in_place() -> None:
    stored, seal = GcmBlocks(KEY, IDENTITY).seal(3, memoryview(BLOCK))
    assert (stored.nbytes, len(seal)) == (len(BLOCK), 16)
    assert bytes(stored) != BLOCK
    data = bytearray(stored)
    assert GcmBlocks(KEY, IDENTITY).open(3, memoryview(data), seal, memoryview(data))
    assert data == BLOCK


@pytest.mark.parametrize(
    ("key", "identity", "index", "flipped"),
    [(KEY[::-1], IDENTITY, 3, 0), (KEY, b"other", 3, 0), (KEY, IDENTITY, 4, 0), (KEY, IDENTITY, 3, 1)],
    ids=["key", "entry", "place", "bit"],
)
def test_a_block_of_another_key_entry_or_place_and_a_changed_one_are_refused(
    key: bytes, identity: bytes, index: int, flipped: int
) -> None:
    stored, seal = GcmBlocks(KEY, IDENTITY).seal(3, memoryview(BLOCK))
    data = bytearray(stored)
    data[100] ^= flipped
    before = bytes(data)
    assert not GcmBlocks(key, identity).open(index, memoryview(data), seal, memoryview(data))
    assert data == before
