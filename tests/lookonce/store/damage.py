"""Accidental damage to stored values: to bits, bytes, blocks and length, and mixtures of several real values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from lookonce.store.codec import HEADER_BYTES

Damage = Callable[[bytes], bytes]
# Most of a header is zeros. By these sizes damage hits the fields, the seals and the rows as often as all the rest.
_FIELDS_AND_SEALS_BYTES = 180
_HEADER_SEAL_BYTES = 40


def flip(bits: Sequence[tuple[int, int]]) -> Damage:
    """Inverts bits, given as (offset, bit)."""

    def apply(value: bytes) -> bytes:
        changed = bytearray(value)
        for offset, bit in bits:
            if offset < len(changed):
                changed[offset] ^= 1 << bit
        return bytes(changed)

    return apply


def overwrite(offset: int, data: bytes) -> Damage:
    """Replaces bytes by others at an offset."""
    return lambda value: value[:offset] + data + value[offset + len(data) :]


def zero(offset: int, length: int) -> Damage:
    """Zeroes a range, as a lost page would."""
    return lambda value: (value[:offset] + bytes(length))[: len(value)] + value[offset + length :]


def insert(offset: int, data: bytes) -> Damage:
    """Inserts bytes and shifts the rest back."""
    return lambda value: value[:offset] + data + value[offset:]


def remove(offset: int, length: int) -> Damage:
    """Removes bytes and shifts the rest forward."""
    return lambda value: value[:offset] + value[offset + length :]


def cut(offset: int) -> Damage:
    """Cuts the value off at an offset."""
    return lambda value: value[:offset]


def extend(tail: bytes) -> Damage:
    """Appends bytes to the end of the value."""
    return lambda value: value + tail


def repeat(source: int, target: int, length: int) -> Damage:
    """Copies a part of the value to another place."""
    return lambda value: overwrite(target, value[source : source + length][: max(0, len(value) - target)])(value)


def splice(other: bytes, offset: int, length: int) -> Damage:
    """Copies a part of another value to the same place."""
    return lambda value: overwrite(offset, other[offset : offset + length])(value)


def reorder(block_bytes: int, order: Sequence[int]) -> Damage:
    """Returns the header followed by the blocks with these indices."""

    def apply(value: bytes) -> bytes:
        rows = value[HEADER_BYTES:]
        return value[:HEADER_BYTES] + b"".join(rows[index * block_bytes :][:block_bytes] for index in order)

    return apply


def damaged(value: bytes, others: Sequence[bytes], block_bytes: int) -> st.SearchStrategy[bytes]:
    """Draws the value after one to three accidents; `others` are real values that may be mixed in."""
    interesting = [
        offset
        for offset in range(len(value))
        if offset < _FIELDS_AND_SEALS_BYTES or offset >= HEADER_BYTES - _HEADER_SEAL_BYTES
    ]
    offsets = st.integers(0, len(value) - 1) | st.sampled_from(interesting)
    lengths = st.integers(1, 64) | st.integers(1, len(value))
    data = st.binary(min_size=1, max_size=64)
    other = st.sampled_from(others)
    num_blocks = max(1, -(-(len(value) - HEADER_BYTES) // block_bytes))
    orders = st.permutations(range(num_blocks)) | st.lists(st.integers(0, num_blocks - 1), min_size=1, max_size=9)
    accidents = st.one_of(
        st.builds(flip, st.lists(st.tuples(offsets, st.integers(0, 7)), min_size=1, max_size=8)),
        st.builds(overwrite, offsets, data),
        st.builds(zero, offsets, lengths),
        st.builds(insert, offsets, data),
        st.builds(remove, offsets, lengths),
        st.builds(cut, offsets),
        st.builds(extend, data | other),
        st.builds(repeat, offsets, offsets, lengths),
        st.builds(splice, other, offsets | st.just(HEADER_BYTES), lengths),
        st.builds(functools.partial(reorder, block_bytes), orders),
    )
    changed = st.lists(accidents, min_size=1, max_size=3).map(
        lambda chosen: functools.reduce(lambda found, accident: accident(found), chosen, value)
    )
    return changed | other | st.binary(max_size=200)
