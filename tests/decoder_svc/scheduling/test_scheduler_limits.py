"""The smallest chunk that a step computes for a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.scheduling.scheduler_limits import ChunkSize, SchedulerLimits
from lookonce.families.base import Mask
from tests.decoder_svc.scheduling.simulation import image, request


def minimum(min_tokens: int = 1, *, deterministic: bool = False, block_size: int = 4) -> ChunkSize:
    limits = SchedulerLimits(16, 8, 200, 64, deterministic, min_tokens)
    return ChunkSize(limits, block_size)


@pytest.mark.parametrize(("start", "expected"), [(0, 3), (7, 3), (8, 2), (9, 1)])
def test_the_configured_minimum_is_cut_at_the_last_known_token(start: int, expected: int) -> None:
    assert minimum(3).least(request("a", 10), start) == expected


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        # Text, and text up to the image.
        (0, 3),
        (2, 2),
        # The whole image, or what is left of it.
        (4, 6),
        (6, 4),
        (10, 2),
    ],
)
def test_an_image_whose_tokens_see_each_other_is_never_cut(start: int, expected: int) -> None:
    one = request("a", 12, (image("x", 4, 6),), mask=Mask.IMAGE)
    assert minimum(3).least(one, start) == expected


def test_a_prompt_whose_tokens_all_see_each_other_is_one_chunk() -> None:
    assert minimum(3).least(request("a", 12, mask=Mask.PROMPT), 0) == 12


@given(num_tokens=st.integers(1, 40), num_generated=st.integers(1, 5), block_size=st.integers(1, 8))
def test_deterministic_chunks_are_the_blocks_of_the_prompt_then_single_tokens(
    num_tokens: int, num_generated: int, block_size: int
) -> None:
    one = request("a", num_tokens)
    one.token_ids += [7] * num_generated
    rule = minimum(deterministic=True, block_size=block_size)
    starts = [0]
    while starts[-1] < one.num_tokens:
        starts.append(starts[-1] + rule.least(one, starts[-1]))
    of_blocks = [*range(0, num_tokens, block_size), num_tokens]
    assert starts == [*of_blocks, *range(num_tokens + 1, num_tokens + num_generated + 1)]
