"""Held-out wordings never occur in training, and every pattern can be filled."""

from __future__ import annotations

import random

import pytest

from demo.wordings import HELD_OUT_OPENERS, TRAINING_OPENERS, WORDINGS, QuestionKind, all_expansions, choose


def test_no_held_out_wording_is_a_training_wording_of_any_kind() -> None:
    training = {text for each in WORDINGS.values() for pattern in each.training for text in all_expansions(pattern)}
    held_out = {text for each in WORDINGS.values() for pattern in each.held_out for text in all_expansions(pattern)}
    assert not training & held_out
    assert not set(TRAINING_OPENERS) & set(HELD_OUT_OPENERS)


@pytest.mark.parametrize("kind", list(QuestionKind))
def test_every_kind_has_several_wordings_of_both_sorts(kind: QuestionKind) -> None:
    assert len(WORDINGS[kind].training) >= 8
    assert len(WORDINGS[kind].held_out) >= 3


def test_choose_returns_one_of_all_expansions() -> None:
    pattern = "[Tell me|Say] the [colour|shape] of {thing}."
    expansions = all_expansions(pattern)
    assert len(expansions) == 4
    assert {choose(pattern, random.Random(seed)) for seed in range(50)} == expansions
