"""Prompt lookup decoding (Saxena 2023): proposes the tokens that followed an earlier occurrence of the last few tokens.

The index grows with the request, so the cost of a look-up does not depend on the request's length. Plain Python; knows
token ids only.
"""

from __future__ import annotations

from collections.abc import Sequence

# Earlier places that are compared, the latest first. Repetitive text has many, and the latest is nearly always right.
MAX_PLACES = 16


class NgramProposer:
    """Looks up the end of one sequence in the sequence itself, which only ever grows."""

    def __init__(self, min_length: int, max_length: int) -> None:
        """A match is at least `min_length` tokens long; among several, longer ones win, up to `max_length` tokens."""
        assert 1 <= min_length <= max_length
        self._min_length = min_length
        self._max_length = max_length
        # A place is the index of the token behind a run of `min_length` tokens. Maps each run to its latest place.
        self._latest: dict[tuple[int, ...], int] = {}
        # Maps each place to the previous place of the same run; 0: there is none.
        self._earlier: list[int] = [0] * min_length

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Proposes `num_tokens` ids to follow `token_ids`, or none if its last tokens did not occur before.

        Copies from the earlier occurrence with the longest match, or the latest of several. A copy that reaches the
        end continues with its own output (as in LZ77), so even a short loop is continued for `num_tokens` tokens.
        """
        self._index(token_ids)
        place = self._best_place(token_ids)
        if place == 0:
            return []
        copied = list(token_ids[place : place + num_tokens])
        period = len(token_ids) - place
        while len(copied) < num_tokens:
            copied.append(copied[len(copied) - period])
        return copied

    def _index(self, token_ids: Sequence[int]) -> None:
        """Adds all new places to the index. The last token has no successor yet, so its run is not added."""
        latest, earlier, length = self._latest, self._earlier, self._min_length
        for place in range(len(earlier), len(token_ids)):
            run = tuple(token_ids[place - length : place])
            earlier.append(latest.get(run, 0))
            latest[run] = place

    def _best_place(self, token_ids: Sequence[int]) -> int:
        """Returns the place with the longest match, or 0 if there is none."""
        best = best_length = 0
        place = self._latest.get(tuple(token_ids[-self._min_length :]), 0)
        for _ in range(MAX_PLACES):
            if place == 0 or best_length == self._max_length:
                break
            length = self._match_length(token_ids, place)
            if length > best_length:
                best, best_length = place, length
            place = self._earlier[place]
        return best

    def _match_length(self, token_ids: Sequence[int], place: int) -> int:
        """Returns how many tokens before `place` equal those at the end; at least `min_length` are known to."""
        length, end = self._min_length, len(token_ids)
        longest = min(self._max_length, place)
        while length < longest and token_ids[place - 1 - length] == token_ids[end - 1 - length]:
            length += 1
        return length
