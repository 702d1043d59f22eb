"""Faults seeded into the sampler: its tests notice each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decoder_svc.runner.sampling import penalties, sampler
from decoder_svc.runner.sampling.sample_row import SampleRow
from decoder_svc.runner.sampling.sampler import Sampler
from decoder_svc.runner.sampling.sampling_batch import DrawGroup, SamplingBatch
from decoder_svc.runner.sampling.sampling_state import TokenCounts, UniformDraws
from tests.decoder_svc.runner.sampling import test_sampler
from tests.decoder_svc.scheduling.mutation import Mutations, Patch

mutation = Mutations()
CHECKS: Sequence[Callable[[], object]] = (
    test_sampler.test_greedy_takes_the_most_likely,
    test_sampler.test_a_seed_gives_the_same_tokens_in_any_batch,
    test_sampler.test_the_draw_changes_from_token_to_token,
    test_sampler.test_top_k_keeps_k_tokens,
    test_sampler.test_top_p_keeps_the_smallest_set_that_reaches_it,
    test_sampler.test_min_p_is_relative_to_the_most_likely,
    test_sampler.test_penalties_and_biases_touch_their_own_row_only,
    test_sampler.test_presence_and_frequency_count_the_output_only,
    test_sampler.test_stop_ids_wait_for_min_tokens,
    test_sampler.test_logprobs_are_those_of_the_raw_logits,
    test_sampler.test_dropped_drafts_are_not_counted,
    test_sampler.test_a_mask_excludes_tokens_from_greedy_and_sampled_rows_and_from_no_other_row,
    test_sampler.test_a_masked_draw_follows_the_distribution_of_what_is_left,
    lambda: test_sampler.test_masked_draws_of_a_large_vocabulary_never_leave_the_mask(300),
    test_sampler.test_a_mask_is_stronger_than_biases_and_min_tokens,
    test_sampler.test_log_probabilities_are_those_without_the_mask,
    test_sampler.test_rows_with_masks_keep_the_next_step_waiting_and_the_likeliest_ids_are_not_taken,
    test_sampler.test_sampling_follows_the_softmax_at_its_temperature,
    test_sampler.test_every_row_gets_the_references_token_in_any_batch,
)


def change_draw(patch: Patch, change: Callable[[Tensor, Tensor, DrawGroup], tuple[Tensor, Tensor, DrawGroup]]) -> None:
    original = sampler.draw
    patch.setattr(sampler, "draw", lambda *arguments: original(*change(*arguments)))


@mutation
def each_token_of_an_answer_gets_the_same_random_number(patch: Patch) -> None:
    original = UniformDraws.__getitem__
    patch.setattr(UniformDraws, "__getitem__", lambda self, index: original(self, 0))


@mutation
def the_seed_is_not_used(patch: Patch) -> None:
    original = UniformDraws.__init__
    patch.setattr(UniformDraws, "__init__", lambda self, seed: original(self, 7))


@mutation
def random_numbers_depend_on_the_place_in_the_batch(patch: Patch) -> None:
    change_draw(patch, lambda logits, uniform, group: (logits, uniform.roll(1, 0), group))


@mutation
def the_temperature_counts_twice(patch: Patch) -> None:
    change_draw(
        patch, lambda logits, uniform, group: (logits, uniform, replace(group, temperature=group.temperature**2))
    )


@mutation
def one_token_too_many_is_in_top_k(patch: Patch) -> None:
    def change(logits: Tensor, uniform: Tensor, group: DrawGroup) -> tuple[Tensor, Tensor, DrawGroup]:
        beyond = group.is_beyond_top_k
        if beyond is not None:
            beyond = torch.cat([torch.zeros_like(beyond[:, :1]), beyond[:, :-1]], dim=1)
        return logits, uniform, replace(group, is_beyond_top_k=beyond)

    change_draw(patch, change)


@mutation
def top_p_is_not_applied(patch: Patch) -> None:
    change_draw(patch, lambda logits, uniform, group: (logits, uniform, replace(group, top_p=None)))


@mutation
def min_p_is_not_applied(patch: Patch) -> None:
    change_draw(patch, lambda logits, uniform, group: (logits, uniform, replace(group, min_p=None)))


@mutation
def a_draw_beyond_the_sorted_tokens_takes_the_last_of_them(patch: Patch) -> None:
    def change(logits: Tensor, uniform: Tensor, group: DrawGroup) -> tuple[Tensor, Tensor, DrawGroup]:
        return logits, uniform, replace(group, is_open=torch.zeros_like(group.is_open), has_open_rows=False)

    patch.setattr("decoder_svc.runner.sampling.sampling_batch.SORTED_TOKENS", 2)
    change_draw(patch, change)


@mutation
def penalties_count_drafts_for_good(patch: Patch) -> None:
    original = penalties._penalties
    patch.setattr(penalties, "_penalties", lambda row, index, vocab: original(replace(row, num_drafts=0), index, vocab))


@mutation
def presence_counts_the_prompt(patch: Patch) -> None:
    original = TokenCounts.update

    def update(self: TokenCounts, token_ids: Any) -> Any:
        ids, counts = original(self, token_ids)
        return ids, np.maximum(counts, 1)

    patch.setattr(TokenCounts, "update", update)


@mutation
def penalties_reach_the_next_row(patch: Patch) -> None:
    original = penalties._penalties
    patch.setattr(penalties, "_penalties", lambda row, index, vocab: original(row, max(0, index - 1), vocab))


@mutation
def min_tokens_is_one_too_few(patch: Patch) -> None:
    counted: Any = vars(SampleRow)["num_output_tokens"]
    patch.setattr(SampleRow, "num_output_tokens", property(lambda self: counted.fget(self) + 1))


@mutation
def log_probabilities_are_those_of_the_mask(patch: Patch) -> None:
    original = Sampler._masked

    def masked(self: Sampler, adjusted: Tensor, logits: Tensor, rows: Any, places: Any) -> Tensor:
        found = original(self, adjusted, logits, rows, places)
        logits.set_(found)
        return found

    patch.setattr(Sampler, "_masked", masked)


@mutation
def the_bits_of_a_mask_are_read_from_the_other_end(patch: Patch) -> None:
    original = sampler.unpacked_masks

    def unpacked(masks: Tensor, vocab: int) -> Tensor:
        bits = original(masks, 8 * masks.shape[1]).view(len(masks), -1, 8).flip(-1)
        return bits.reshape(len(masks), -1)[:, :vocab]

    patch.setattr(sampler, "unpacked_masks", unpacked)


@mutation
def masks_are_those_of_the_next_row(patch: Patch) -> None:
    original = Sampler._masked

    def masked(self: Sampler, adjusted: Tensor, logits: Tensor, rows: Sequence[SampleRow], places: list[int]) -> Tensor:
        return original(self, adjusted, logits, rows, [(place + 1) % len(rows) for place in places])

    patch.setattr(Sampler, "_masked", masked)


@mutation
def a_bias_is_stronger_than_the_mask(patch: Patch) -> None:
    original = Sampler._masked
    patch.setattr(
        Sampler,
        "_masked",
        lambda self, adjusted, logits, rows, places: original(self, adjusted, adjusted, rows, places),
    )


@mutation
def masked_rows_run_ahead(patch: Patch) -> None:
    original = Sampler.launch
    patch.setattr(Sampler, "launch", lambda *arguments: replace(original(*arguments), may_run_ahead=True))


@mutation
def the_likeliest_token_is_taken_without_a_look_at_biases(patch: Patch) -> None:
    patch.setattr(SamplingBatch, "changes_logits", property(lambda self: False))


def noticed() -> bool:
    try:
        for check in CHECKS:
            check()
    except (AssertionError, pytest.fail.Exception):
        return True
    return False


def test_the_sampler_as_it_is_passes() -> None:
    assert not noticed()


@pytest.mark.parametrize("name", mutation)
def test_each_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation[name](monkeypatch)
    assert noticed()
