"""Look-ups against a search that anybody can read."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from decoder_svc.scheduling.speculation import MAX_PLACES, NgramProposer


def propose_slowly(token_ids: Sequence[int], num_tokens: int, min_length: int, max_length: int) -> list[int]:
    """The proposer's specification, by a search over all places."""
    end = len(token_ids)
    places = [
        place
        for place in range(end - 1, min_length - 1, -1)
        if token_ids[place - min_length : place] == token_ids[end - min_length :]
    ][:MAX_PLACES]
    if not places:
        return []

    def match_length(place: int) -> int:
        lengths = range(min_length, min(max_length, place) + 1)
        return max(length for length in lengths if token_ids[place - length : place] == token_ids[end - length :])

    # The first of those with the longest match: places are in order, the latest first.
    best = max(places, key=match_length)
    known = list(token_ids)
    for index in range(num_tokens):
        known.append(known[best + index])
    return known[end:]


@st.composite
def growing(draw: st.DrawFn) -> tuple[list[int], list[int], tuple[int, int]]:
    """A sequence of few different tokens, the lengths at which it is looked at, and how much is looked up."""
    token_ids = draw(st.lists(st.integers(0, draw(st.integers(0, 4))), min_size=1, max_size=60))
    looks = [*sorted(draw(st.lists(st.integers(1, len(token_ids)), max_size=12))), len(token_ids)]
    min_length = draw(st.integers(1, 4))
    return token_ids, looks, (min_length, min_length + draw(st.integers(0, 4)))


@settings(max_examples=500)
@given(sequence=growing(), num_tokens=st.integers(0, 9))
def test_it_agrees_with_a_full_search(sequence: tuple[list[int], list[int], tuple[int, int]], num_tokens: int) -> None:
    token_ids, looks, (min_length, max_length) = sequence
    proposer = NgramProposer(min_length, max_length)
    for length in looks:
        known = token_ids[:length]
        assert proposer.propose(known, num_tokens) == propose_slowly(known, num_tokens, min_length, max_length)


def test_nothing_comes_of_tokens_that_did_not_occur() -> None:
    assert NgramProposer(2, 4).propose([1, 2, 3, 4], 5) == []
    assert NgramProposer(2, 4).propose([1], 5) == []


def test_the_occurrence_with_the_longer_match_is_copied() -> None:
    #            8 follows 7 1 2, and later 9 follows 6 1 2
    assert NgramProposer(2, 4).propose([7, 1, 2, 8, 6, 1, 2, 9, 5, 7, 1, 2], 1) == [8]
    assert NgramProposer(2, 2).propose([7, 1, 2, 8, 6, 1, 2, 9, 5, 7, 1, 2], 1) == [9]


def test_a_loop_is_guessed_to_go_on_however_short_it_is() -> None:
    assert NgramProposer(2, 4).propose([3, 5, 5, 5], 6) == [5] * 6
    assert NgramProposer(2, 4).propose([1, 2, 3, 1, 2, 3, 1], 7) == [2, 3, 1, 2, 3, 1, 2]
