"""Division of keys among programs, run by Triton's interpreter: every piece once, and few enough partial results."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoder_svc.runner.cuda import triton_splits_kernels as kernels
from tests.decoder_svc.runner.cuda.interpreted_triton import MANY, triton_splits

TOKENS_EACH = 9
NUM_HEADS, NUM_KV_HEADS = 28, 4
# New tokens, and all tokens, of a sequence.
Lengths = tuple[int, int]
ANY_LENGTHS = st.tuples(st.sampled_from((0, 1, 1, 1, 5, 30, 400)), st.integers(0, 140_000)).map(
    lambda drawn: (drawn[0], max(drawn))
)


def parts_of(
    lengths: Sequence[Lengths], window: int | None = None, num_processors: int = MANY
) -> list[tuple[int, int, int]]:
    """Returns new tokens, tiles and parts of each sequence."""
    query_starts = torch.tensor([0, *(num_new for num_new, _ in lengths)]).cumsum(0).to(torch.int32)
    kv_lens = torch.tensor([num_tokens for _, num_tokens in lengths], dtype=torch.int32)
    grid = grid_of(lengths, num_processors)
    found = torch.zeros(3, grid.padded_sequences, dtype=torch.int32)
    kernels.report_division[(1,)](
        query_starts, kv_lens, torch.zeros_like(kv_lens), len(lengths), window or 0, grid.wanted_each, found,
        TOKENS_EACH=TOKENS_EACH, PADDED_SEQUENCES=grid.padded_sequences, HAS_WINDOW=window is not None,
    )  # fmt: skip
    return [(row[0], row[1], row[2]) for row in found[:, : len(lengths)].T.tolist()]


def grid_of(lengths: Sequence[Lengths], num_processors: int = MANY) -> triton_splits.SplitGrid:
    num_tokens = sum(num_new for num_new, _ in lengths)
    longest = max(num_tokens for _, num_tokens in lengths)
    shape = triton_splits.StepShape(num_tokens, len(lengths), longest, NUM_HEADS, NUM_KV_HEADS, TOKENS_EACH)
    return triton_splits.split_grid(shape, num_processors)


def test_long_sequences_have_more_parts() -> None:
    lengths = [(1, 100), (1, 4000), (1, 131_072), (0, 5000)]
    assert [parts for _, _, parts in parts_of(lengths)] == [1, 32, 33, 33]
    assert [parts for _, _, parts in parts_of(lengths, window=512)] == [1, 5, 5, 4]


def test_a_full_batch_divides_only_what_is_longer_than_others() -> None:
    lengths = [(1, 1000)] * 63 + [(1, 32_000)]
    parts = [parts for _, _, parts in parts_of(lengths)]
    assert parts == [1] * 63 + [32]
    assert {parts for _, _, parts in parts_of([(1, 1000)] * 30)} == {2}


def test_a_chunk_over_a_cached_prompt_is_divided_and_a_whole_prompt_is_not() -> None:
    assert parts_of([(30, 4000)]) == [(30, 4, 8)]
    assert parts_of([(512, 512), (1, 2000)])[0] == (512, 57, 1)


def test_keys_are_not_divided_on_a_device_that_is_full_anyway() -> None:
    assert {parts for _, _, parts in parts_of([(1, 100_000), (30, 4000)], num_processors=2)} == {1}
    assert grid_of([(1, 100_000)], num_processors=2).num_partials == 0


@settings(max_examples=50)
@given(lengths=st.lists(ANY_LENGTHS, min_size=1, max_size=70), data=st.data())
def test_parts_do_not_depend_on_other_lengths_and_partial_results_fit(
    lengths: list[Lengths], data: st.DataObject
) -> None:
    found = parts_of(lengths)
    for (num_new, num_tiles, parts), (given_new, _) in zip(found, lengths, strict=True):
        assert num_new == given_new
        assert num_tiles == -(-num_new // TOKENS_EACH)
        assert 1 <= parts <= 128
    assert sum(num_new * parts for num_new, _, parts in found if parts > 1) <= grid_of(lengths).num_partials
    index = data.draw(st.integers(0, len(lengths) - 1))
    others = [(num_new, data.draw(st.integers(num_new, 140_000))) for num_new, _ in lengths]
    assert parts_of([*others[:index], lengths[index], *others[index + 1 :], (0, 7)])[index] == found[index]


@settings(max_examples=20)
@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=20), seed=st.integers(0, 9))
def test_every_piece_is_found_once(counts: list[int], seed: int) -> None:
    padded = torch.zeros(64, dtype=torch.int32)
    padded[: len(counts)] = torch.tensor(counts)
    values = torch.randint(1, 50, (64,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    found = torch.full((sum(counts), 3), -1, dtype=torch.int32)
    kernels.report_pieces[(1,)](padded, values, found, PADDED_SEQUENCES=64)
    wanted = [
        [sequence, place, int(values[sequence])] for sequence, count in enumerate(counts) for place in range(count)
    ]
    assert found.tolist() == wanted


@pytest.mark.parametrize("num_sequences", [1, 64, 65, 200])
def test_a_grid_holds_all_sequences_and_is_no_larger_than_the_device(num_sequences: int) -> None:
    grid = grid_of([(1, 4000)] * num_sequences)
    assert grid.padded_sequences >= num_sequences
    assert 0 < grid.num_programs <= 2 * MANY
    assert grid.num_joining > 0


def test_memory_for_partial_results_does_not_depend_on_lengths() -> None:
    short, long = grid_of([(1, 128)] * 8), grid_of([(1, 131_072)] * 8)
    assert short.num_partials == long.num_partials
    assert (short.num_programs, short.num_joining) == (8 * NUM_KV_HEADS, 0)
