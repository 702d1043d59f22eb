"""What was read from the shared cache is prolonged in a few calls, and trouble with that is nobody's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from decoder_svc.rows.ttl_refresher import TtlRefresher
from lookonce.content_key import ContentKey, ProcessorOptions
from lookonce.errors import UnavailableError
from tests.decoder_svc.scheduling.simulation import key

PLAIN, SMALL = ProcessorOptions(), ProcessorOptions(max_pixels=100)


class Encoder:
    """Notes what it is told."""

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


async def test_each_image_is_told_once_however_often_it_was_read() -> None:
    encoder = Encoder()
    queue = TtlRefresher(encoder.touch, interval_s=0.05)
    for name in ("a", "b", "a", "a"):
        queue.note(key(name), PLAIN)
    await told(encoder)
    assert encoder.calls == [([key("a"), key("b")], PLAIN)]
    queue.note(key("a"), PLAIN)
    await told(encoder)
    assert encoder.calls[1:] == [([key("a")], PLAIN)]
    await queue.close()


async def test_options_and_long_lists_take_calls_of_their_own() -> None:
    encoder = Encoder()
    queue = TtlRefresher(encoder.touch, interval_s=0.05)
    for index in range(300):
        queue.note(key(f"image {index}"), PLAIN)
    queue.note(key("small"), SMALL)
    await told(encoder)
    assert [(len(keys), options) for keys, options in encoder.calls] == [(256, PLAIN), (44, PLAIN), (1, SMALL)]
    await queue.close()


async def test_an_encoder_that_is_away_is_told_the_next_ones() -> None:
    encoder = Encoder()
    queue = TtlRefresher(encoder.touch, interval_s=0.02)
    encoder.is_away = True
    queue.note(key("a"), PLAIN)
    await told(encoder)
    encoder.is_away = False
    queue.note(key("b"), PLAIN)
    await told(encoder)
    assert [keys for keys, _ in encoder.calls] == [[key("a")], [key("b")]]
    await queue.close()


async def test_closing_forgets() -> None:
    encoder = Encoder()
    queue = TtlRefresher(encoder.touch, interval_s=30)
    queue.note(key("a"), PLAIN)
    await queue.close()
    assert encoder.calls == []
