"""Entries that were read get a longer lifetime in a few calls, and a failing call harms no request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from decoder_svc.rows.ttl_refresher import TtlRefresher
from lookonce.content_key import ContentKey, ProcessorOptions
from lookonce.errors import UnavailableError
from tests.decoder_svc.scheduling.simulation import key

PLAIN, SMALL = ProcessorOptions(), ProcessorOptions(max_pixels=100)


class Encoder:
    """An encoder that records the calls it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[ContentKey], ProcessorOptions]] = []
        self.told = asyncio.Event()
        self.is_away = False

    async def touch(self, keys: Sequence[ContentKey], options: ProcessorOptions) -> None:
        self.calls.append((list(keys), options))
        self.told.set()
        if self.is_away:
            raise UnavailableError("away")


async def told(encoder: Encoder) -> None:
    async with asyncio.timeout(10):
        await encoder.told.wait()
    encoder.told.clear()
    await asyncio.sleep(0.01)


async def test_each_image_is_reported_once_however_often_it_was_read() -> None:
    encoder = Encoder()
    refresher = TtlRefresher(encoder.touch, interval_s=0.05)
    for name in ("a", "b", "a", "a"):
        refresher.note(key(name), PLAIN)
    await told(encoder)
    assert encoder.calls == [([key("a"), key("b")], PLAIN)]
    refresher.note(key("a"), PLAIN)
    await told(encoder)
    assert encoder.calls[1:] == [([key("a")], PLAIN)]
    await refresher.close()


async def test_options_and_long_lists_take_calls_of_their_own() -> None:
    encoder = Encoder()
    refresher = TtlRefresher(encoder.touch, interval_s=0.05)
    for index in range(300):
        refresher.note(key(f"image {index}"), PLAIN)
    refresher.note(key("small"), SMALL)
    await told(encoder)
    assert [(len(keys), options) for keys, options in encoder.calls] == [(256, PLAIN), (44, PLAIN), (1, SMALL)]
    await refresher.close()


async def test_after_a_failed_call_later_keys_are_still_reported() -> None:
    encoder = Encoder()
    refresher = TtlRefresher(encoder.touch, interval_s=0.02)
    encoder.is_away = True
    refresher.note(key("a"), PLAIN)
    await told(encoder)
    encoder.is_away = False
    refresher.note(key("b"), PLAIN)
    await told(encoder)
    assert [keys for keys, _ in encoder.calls] == [[key("a")], [key("b")]]
    await refresher.close()


async def test_closing_drops_keys_that_were_not_reported() -> None:
    encoder = Encoder()
    refresher = TtlRefresher(encoder.touch, interval_s=30)
    refresher.note(key("a"), PLAIN)
    await refresher.close()
    assert encoder.calls == []
