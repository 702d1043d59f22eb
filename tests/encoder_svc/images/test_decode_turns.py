"""Tenants share the decoding by the pixels that it costs, and a small picture does not queue behind giants."""

from __future__ import annotations

import asyncio
import threading

import PIL.Image
import pytest

from encoder_svc.images.decode_turns import MIN_PIXELS, decode_request
from encoder_svc.images.decode_worker import DecodeWorker
from lookonce.media.image_header import ImageHeader, ImageLimits, probe_image
from lookonce.turns.cost_turns import CostTurns
from lookonce.turns.fair_queue import CallerId
from tests import image_files
from tests.encoder_svc.conftest import StartEncoder
from tests.encoder_svc.encode_requests import TIMEOUT_S, png, settled, source
from tests.encoder_svc.encode_requests import request as encode_request


def test_the_smallest_pictures_count_alike() -> None:
    costs = [decode_request(CallerId("a", "one"), 0, pixels).cost for pixels in (1, MIN_PIXELS, MIN_PIXELS + 1)]
    assert costs == [MIN_PIXELS, MIN_PIXELS, MIN_PIXELS + 1]


@pytest.mark.parametrize("tenant", ["a", "b"])
async def test_an_encoder_decodes_a_small_picture_before_the_giants_that_wait(
    start_encoder: StartEncoder, monkeypatch: pytest.MonkeyPatch, tenant: str
) -> None:
    gate, begun = threading.Event(), list[int]()
    decode = DecodeWorker.decode

    def gated(self: DecodeWorker, data: bytes) -> tuple[PIL.Image.Image, ImageHeader]:
        image, header = decode(self, data)
        begun.append(header.width)
        assert gate.wait(TIMEOUT_S)
        return image, header

    monkeypatch.setattr(DecodeWorker, "decode", gated)
    async with start_encoder("llava_clip", preprocess_workers=1) as encoder:

        def sent(data: bytes, tenant: str) -> asyncio.Task[object]:
            call = encoder.stub.Encode(encode_request(source(data)), metadata=(("x-lookonce-tenant", tenant),))
            return asyncio.create_task(asyncio.wait_for(call, TIMEOUT_S))

        waiting = encoder.pipeline._encoder._budget._grants._waiting
        calls = [sent(png(seed, 1600, 1200), "a") for seed in range(5)]
        await settled(lambda: len(begun) == 1 and len(waiting) == 4)
        calls.append(sent(png(9), tenant))
        await settled(lambda: len(waiting) == 5)
        gate.set()
        await asyncio.gather(*calls)
    assert begun == [1600, 80, 1600, 1600, 1600, 1600]


def test_another_tenant_s_photo_is_decoded_before_the_rest_of_the_jpegs_of_many_scans_that_wait() -> None:
    limits = ImageLimits(max_bytes=1 << 20, max_pixels=100_000_000, max_aspect=50.0)
    # The photo has more pixels than each of the files, and takes less time to decode.
    photo = probe_image(image_files.encoded(PIL.Image.new("RGB", (4000, 3000)), "JPEG", progressive=True), limits)
    costly = probe_image(image_files.jpeg_of_many_scans(512, 512, 3800), limits)
    turns: CostTurns[str] = CostTurns()

    def put(tenant: str, number: int, header: ImageHeader) -> None:
        turns.put(decode_request(CallerId(tenant, str(number)), number, header.num_pixels), tenant)

    for number in range(64):
        put("a", number, costly)
    assert turns.take() == "a"
    put("b", 100, photo)
    assert turns.take() == "b"
    assert {turns.take() for _ in range(len(turns))} == {"a"}
