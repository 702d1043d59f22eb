"""Tests that both sides of a process mean the same mask by a number."""

from __future__ import annotations

import random

import pytest

from decoder_svc.constraint.mask_numbers import MAX_MASKS, MaskNumbers, NumberedMasks


@pytest.mark.parametrize("seed", range(20))
def test_a_number_is_the_mask_that_was_sent_though_old_ones_are_dropped(seed: int) -> None:
    rng = random.Random(seed)
    numbers, masks = MaskNumbers(), NumberedMasks()
    # Few masks that return, and many that do not; an outcome may name more than are kept.
    pool = [rng.randbytes(8) for _ in range(rng.choice([3, MAX_MASKS, 3 * MAX_MASKS]))]
    num_sent = 0
    for _ in range(60):
        wanted = rng.choices(pool, k=rng.choice([1, 5, 70, 2 * MAX_MASKS]))
        new_masks: dict[int, bytes] = {}
        named = [numbers.number(mask, new_masks) for mask in wanted]
        num_sent += len(new_masks)
        assert masks.masks(named, new_masks) == wanted
        assert len(masks._masks) <= MAX_MASKS
        assert len(numbers._numbers) <= MAX_MASKS
    assert num_sent >= len(pool) or len(pool) > MAX_MASKS
    assert len(pool) > MAX_MASKS or num_sent == len(pool), "a mask that is kept was sent twice"
