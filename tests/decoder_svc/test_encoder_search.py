"""A decoder looks for its encoder often at first, seldom later, and logs the reason once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from decoder_svc import service
from decoder_svc.service import EncoderSearch
from lookonce.errors import FingerprintMismatchError, LookonceError, UnavailableError


class Encoders:
    """Stands in for the client: fails with the given errors, the last of them again and again."""

    def __init__(self, *errors: LookonceError) -> None:
        self.errors = list(errors)
        self.has_only_strangers = False
        self.num_asked = 0

    async def info(self) -> None:
        self.num_asked += 1
        raise self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]


async def searched(encoders: Encoders, pauses: int) -> list[float]:
    """Runs a search on a clock that the pauses alone advance. Returns the pauses, seconds."""
    taken: list[float] = []
    clock = [0.0]

    async def sleep(seconds: float) -> None:
        taken.append(seconds)
        clock[0] += seconds
        if len(taken) == pauses:
            raise asyncio.CancelledError

    search = EncoderSearch(encoders, clock=lambda: clock[0], sleep=sleep)  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        await search.run()
    assert search.is_fine
    return taken


async def test_a_search_that_lasts_asks_every_other_second() -> None:
    taken = await searched(Encoders(UnavailableError("nobody")), 40)
    early = [pause for pause in taken if pause < 1]
    assert sum(early) == pytest.approx(service._MAX_SEARCH_S, abs=0.2)
    assert set(taken[len(early) :]) == {2.0}


async def test_each_reason_why_encoders_are_strangers_is_logged_once() -> None:
    first, other = FingerprintMismatchError("one"), FingerprintMismatchError("two")
    encoders: Any = Encoders(first, first, UnavailableError("nobody"), first, other)
    with capture_logs() as lines:
        await searched(encoders, 40)
    assert [(line["event"], line["log_level"], line["reason"]) for line in lines] == [
        ("no encoder of this decoder's model answers", "warning", reason) for reason in ("one", "two")
    ]
