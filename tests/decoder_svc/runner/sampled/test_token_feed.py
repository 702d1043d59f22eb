"""Sampled ids reach the next step's inputs on the device."""

from __future__ import annotations

import pytest
import torch

from decoder_svc.runner.sampled.token_feed import TokenFeed


class Moves:
    """Counts copies to the device."""

    def __init__(self) -> None:
        self.num_moves = 0

    def __call__(self, host: torch.Tensor) -> torch.Tensor:
        self.num_moves += 1
        return host


def test_the_same_batch_in_the_same_order_needs_no_copy() -> None:
    move = Moves()
    feed = TokenFeed(move)
    feed.keep([torch.tensor([5, 6, 7])])
    token_ids = torch.tensor([0, 0, 0, 9])
    feed.write(((0, 0), (1, 1), (2, 2)), token_ids)
    assert token_ids.tolist() == [5, 6, 7, 9]
    assert move.num_moves == 0


def test_tokens_find_their_places_in_another_batch_and_places_are_copied_once() -> None:
    move = Moves()
    feed = TokenFeed(move)
    for first in (5, 15):
        # A step with two forward passes.
        feed.keep([torch.tensor([first]), torch.tensor([first + 1, first + 2])])
        token_ids = torch.tensor([1, 0, 2, 0])
        feed.write(((1, 2), (3, 0)), token_ids)
        assert token_ids.tolist() == [1, first + 2, 2, first]
    assert move.num_moves == 2


def test_a_step_whose_tokens_are_known_is_left_alone() -> None:
    feed = TokenFeed(Moves())
    feed.keep([])
    token_ids = torch.tensor([1, 2])
    feed.write((), token_ids)
    assert token_ids.tolist() == [1, 2]


def test_places_whose_copy_failed_are_copied_again() -> None:
    move = Moves()

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    feed = TokenFeed(move)
    feed.keep([torch.tensor([5, 6, 7])])
    feed.write(((1, 2), (3, 0)), torch.zeros(4, dtype=torch.int64))
    feed._move = fail
    with pytest.raises(torch.OutOfMemoryError):
        feed.write(((0, 1), (2, 2)), torch.zeros(4, dtype=torch.int64))
    feed._move = move
    token_ids = torch.zeros(4, dtype=torch.int64)
    feed.write(((0, 1), (2, 2)), token_ids)
    assert token_ids.tolist() == [6, 0, 7, 0]
