"""Guesses a request's next tokens: what followed when its last few tokens stood in its prompt or answer before.

Prompt lookup decoding (Saxena 2023), as an index that grows with the request, so that a look-up costs the same however
long it is. Plain Python; knows token ids only.
"""

from __future__ import annotations

from collections.abc import Sequence

# Earlier places that are compared, the latest first. Repetitive text has many, and its latest one nearly always fits.
MAX_PLACES = 16


class NgramProposer:
    """Looks up the end of one sequence in the sequence itself. The sequence only ever grows."""

    def __init__(self, min_length: int, max_length: int) -> None:
        """Looks for the last `min_length` tokens, and among the places where they stand for as many as `max_length`."""
        assert 1 <= min_length <= max_length
        self._min_length = min_length
        self._max_length = max_length
        # A place is the index of the token behind a run of `min_length` tokens. Of each run its latest place …
        self._latest: dict[tuple[int, ...], int] = {}
        # … and of each place the one before it with the same run; 0: there is none.
        self._earlier: list[int] = [0] * min_length

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """What may come behind `token_ids`: `num_tokens` ids, or none where its end did not occur before.

        Of the latest places where the last `min_length` tokens stood, the one counts before which most tokens are the
        same, up to `max_length`, and the latest of these. A copy that reaches the end goes on with what it copied
        (as in LZ77), so that a loop is guessed to go on however short it is.
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
        """Takes up places up to the last token: behind that nothing has followed yet."""
        latest, earlier, length = self._latest, self._earlier, self._min_length
        for place in range(len(earlier), len(token_ids)):
            run = tuple(token_ids[place - length : place])
            earlier.append(latest.get(run, 0))
            latest[run] = place

    def _best_place(self, token_ids: Sequence[int]) -> int:
        """0 where there is none."""
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
        """How many tokens before `place` are those at the end; at least `min_length` are known to be."""
        length, end = self._min_length, len(token_ids)
        longest = min(self._max_length, place)
        while length < longest and token_ids[place - 1 - length] == token_ids[end - 1 - length]:
            length += 1
        return length
