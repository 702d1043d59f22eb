"""Accidental damage to stored values: to bits, bytes, blocks and length, and mixtures of several real values."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from lookonce.store.codec import HEADER_BYTES

Damage = Callable[[bytes], bytes]
# Most of a header is zeros. By these sizes damage hits the fields, the seals and the rows as often as all the rest.
_FIELDS_AND_SEALS_BYTES = 180
_HEADER_SEAL_BYTES = 40
# Shares of values that are another real value, and of values without any meaning.
_WHOLE_OTHER, _NONSENSE = 0.05, 0.1


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


def damaged(rng: random.Random, value: bytes, others: Sequence[bytes], block_bytes: int) -> bytes:
    """Returns the value after one to three accidents; `others` are real values that may be mixed in.

    Plain random numbers: Hypothesis takes five times as long to draw thousands of values of which none will be shrunk.
    """
    chance = rng.random()
    if chance < _WHOLE_OTHER:
        return rng.choice(others)
    if chance < _WHOLE_OTHER + _NONSENSE:
        return rng.randbytes(rng.randint(0, 200))
    changed = value
    for _ in range(rng.randint(1, 3)):
        changed = _accident(rng, value, others, block_bytes)(changed)
    return changed


def _accident(rng: random.Random, value: bytes, others: Sequence[bytes], block_bytes: int) -> Damage:
    num_bytes = len(value)

    def offset() -> int:
        if rng.random() < 1 / 2:
            return rng.randrange(num_bytes)
        fields = range(min(_FIELDS_AND_SEALS_BYTES, num_bytes))
        seal_and_rows = range(HEADER_BYTES - _HEADER_SEAL_BYTES, num_bytes)
        index = rng.randrange(len(fields) + len(seal_and_rows))
        return fields[index] if index < len(fields) else seal_and_rows[index - len(fields)]

    def length() -> int:
        return rng.randint(1, 64) if rng.random() < 1 / 2 else rng.randint(1, num_bytes)

    def data() -> bytes:
        return rng.randbytes(rng.randint(1, 64))

    def order() -> list[int]:
        num_blocks = max(1, -(-(num_bytes - HEADER_BYTES) // block_bytes))
        if rng.random() < 1 / 2:
            return rng.sample(range(num_blocks), num_blocks)
        return [rng.randrange(num_blocks) for _ in range(rng.randint(1, 9))]

    accidents: tuple[Callable[[], Damage], ...] = (
        lambda: flip([(offset(), rng.randrange(8)) for _ in range(rng.randint(1, 8))]),
        lambda: overwrite(offset(), data()),
        lambda: zero(offset(), length()),
        lambda: insert(offset(), data()),
        lambda: remove(offset(), length()),
        lambda: cut(offset()),
        lambda: extend(data() if rng.random() < 1 / 2 else rng.choice(others)),
        lambda: repeat(offset(), offset(), length()),
        lambda: splice(rng.choice(others), rng.choice((offset(), HEADER_BYTES)), length()),
        lambda: reorder(block_bytes, order()),
    )
    return rng.choice(accidents)()
