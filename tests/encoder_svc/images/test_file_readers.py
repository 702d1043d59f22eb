"""Tenants and calls take turns in being read, whatever their files cost."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import OrderedDict

from encoder_svc.images import file_readers
from encoder_svc.images.file_readers import FileReaders
from lookonce.turns.caller_order import Turn
from lookonce.turns.fair_queue import CallerId

TIMEOUT_S = 30
_numbers = itertools.count()


def turn(call: str) -> Turn[CallerId]:
    """The position of one more image of a call, whose first letter is its tenant."""
    return Turn(CallerId(call[0], call), next(_numbers), OrderedDict())


async def test_tenants_and_their_calls_take_turns_file_by_file() -> None:
    readers = FileReaders()
    gate = threading.Event()
    read: list[str] = []
    first = threading.Event()
    # One thread is released before the others, and reads alone, so that the order is known.
    events = [first, *[gate] * (file_readers._NUM_THREADS - 1)]
    busy = [asyncio.create_task(readers.run(turn("x"), event.wait, TIMEOUT_S)) for event in events]
    await asyncio.sleep(0)
    calls = ["a1"] * 64 + ["a2", "b1", "b1"]
    waiting = [asyncio.create_task(readers.run(turn(call), read.append, call)) for call in calls]
    await asyncio.sleep(0)
    first.set()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*waiting)
        gate.set()
        await asyncio.gather(*busy)
    assert read[:5] == ["a1", "b1", "a2", "b1", "a1"]
    await asyncio.to_thread(readers.close)
