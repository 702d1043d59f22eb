"""An image that an operator removes is served by no cache of any replica, also as a frame of a video."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from decoder_svc.rows.encoder_client import EncodedImage, EncoderClient
from lookonce.aio import AsyncClient
from lookonce.common.v1 import common_pb2
from lookonce.content_key import image_digest, pair_digest
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1.encoder_service_pb2_grpc import EncoderAdminServiceStub, EncoderServiceStub
from lookonce.errors import EmbeddingNotCachedError
from lookonce.generation import Generation, Message, Part
from lookonce.images import ImageRef
from lookonce.videos import Video
from tests.conftest import ONE_THREAD
from tests.in_process_stack import InProcessStack
from tests.parity import pair_videos, videos
from tests.tiny_families import FAMILIES

TIMEOUT_S = 60.0
SIZE = (80, 60)
MAX_PIXELS = 4000
NUM_FRAMES = 4
# A removal waits for four times the budget.
FLAGS = (*ONE_THREAD, "--redis-budget-s", "1")


@dataclass(frozen=True, slots=True)
class Fleet:
    """Two encoders and two decoders of a model with videos, on one cache."""

    stack: InProcessStack
    # Size to which the frames of a video of SIZE are resized; part of their cache keys.
    frame_size: common_pb2.PixelSize


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = pair_videos.PairModel(FAMILIES["qwen2_5_vl"], tmp_path_factory.mktemp("videos") / "model")
    width, height = model.text.family.frame_size(*SIZE, NUM_FRAMES, None)
    with InProcessStack(
        model.config.folder,
        dtype="float32",
        num_encoders=2,
        num_decoders=2,
        encoder_arguments=FLAGS,
        decoder_arguments=FLAGS,
    ) as stack:
        yield Fleet(stack, common_pb2.PixelSize(width=width, height=height))


@pytest.fixture
async def decoders(fleet: Fleet) -> AsyncIterator[list[AsyncClient]]:
    """A client of each decoder."""
    clients = [AsyncClient.connect(target) for target in fleet.stack.decoder_targets]
    yield clients
    for client in clients:
        await client.aclose()


def files(seed: int, number: int) -> list[bytes]:
    return [videos.png(frame) for frame in videos.frames(seed, number)]


def by_digest(file: bytes, max_pixels: int | None = None) -> ImageRef:
    return ImageRef.from_digest(image_digest(file), max_pixels=max_pixels)


def video_of(frames: Sequence[bytes], *, known: bool = False) -> Video:
    return Video.from_frames([by_digest(one) if known else one for one in frames], size=SIZE)


async def ask(client: AsyncClient, part: Part) -> Generation:
    return await client.generate([Message("user", [part, "what is it"])], max_tokens=2)


def source_of(digest: bytes, frame_size: common_pb2.PixelSize | None = None) -> common_pb2.ImageSource:
    return common_pb2.ImageSource(key=common_pb2.ContentKey(digest=digest), frame_size=frame_size)


async def gone_everywhere(decoders: list[AsyncClient], part: Part) -> None:
    """Waits until no decoder gets the rows by digest: neither Redis, nor an encoder, nor a decoder has them."""
    async with asyncio.timeout(TIMEOUT_S):
        for client in decoders:
            while True:
                try:
                    await ask(client, part)
                except EmbeddingNotCachedError:
                    break
                await asyncio.sleep(0.05)


async def stored_by_uploads(decoders: list[AsyncClient], file: bytes) -> None:
    """Uploads an image to one decoder until another one gets its rows by digest.

    A decoder that has not heard the removal's last message sends the image on as one that came before the removal.
    Each prompt begins anew, so that the prefix cache does not answer for the image.
    """
    async with asyncio.timeout(TIMEOUT_S):
        for number in itertools.count():
            prompt = [Message("user", [f"round {number}", ImageRef.from_bytes(file), "what is it"])]
            await decoders[0].generate(prompt, max_tokens=2)
            try:
                await ask(decoders[1], by_digest(file))
            except EmbeddingNotCachedError:
                await asyncio.sleep(0.05)
            else:
                return


async def test_no_row_of_a_removed_frame_is_served_by_any_replica(fleet: Fleet, decoders: list[AsyncClient]) -> None:
    frames, other_frames = files(51, NUM_FRAMES), files(52, NUM_FRAMES)
    gone = frames[0]
    reduced = ImageRef.from_bytes(gone, max_pixels=MAX_PIXELS)
    for client in decoders:
        for part in (ImageRef.from_bytes(gone), reduced, video_of(frames), video_of(other_frames)):
            await ask(client, part)
    first_pair = pair_digest(image_digest(frames[0]), image_digest(frames[1]))
    for target in fleet.stack.encoder_targets:
        with grpc.insecure_channel(target) as channel:
            source = source_of(first_pair, fleet.frame_size)
            request = pb.EncodeRequest(items=[pb.EncodeItem(image=source)])
            found = EncoderServiceStub(channel).Encode(request, timeout=TIMEOUT_S).results[0]
            assert found.stored, "each encoder can serve the pair before"
    with grpc.insecure_channel(fleet.stack.admin_targets[1]) as channel:
        evict = pb.EvictEmbeddingsRequest(keys=[common_pb2.ContentKey(digest=image_digest(gone))])
        response = await asyncio.to_thread(EncoderAdminServiceStub(channel).EvictEmbeddings, evict, timeout=TIMEOUT_S)
    assert [(image.entries, image.pairs) for image in response.images] == [(2, 1)]
    assert response.evicted == 3
    for target in fleet.stack.encoder_targets:
        with grpc.insecure_channel(target) as channel:
            encoder = EncoderServiceStub(channel)
            for source in (source_of(image_digest(gone)), source_of(first_pair, fleet.frame_size)):
                with pytest.raises(grpc.RpcError) as refused:
                    encoder.Encode(pb.EncodeRequest(items=[pb.EncodeItem(image=source)]), timeout=TIMEOUT_S)
                assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    for part in (by_digest(gone), by_digest(gone, MAX_PIXELS), video_of(frames, known=True)):
        await gone_everywhere(decoders, part)
    again = await ask(decoders[0], video_of(other_frames, known=True))
    assert again.usage.encoded_image_tokens == 0, "another video of the same tenant stays in the shared cache"
    for client in decoders:
        shown = await ask(client, video_of(frames))
        assert shown.usage.skipped_image_tokens == 0, "no keys and values that follow from the image were kept"


async def test_an_image_in_a_decoder_s_queue_is_not_stored_after_its_removal(
    fleet: Fleet, decoders: list[AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder hears of it for the first time after the removal, but it has not been sent anew."""
    (file,) = files(61, 1)
    is_waiting, may_go_on = threading.Event(), threading.Event()
    encode = EncoderClient.encode

    async def encode_late(*arguments: Any, **keywords: Any) -> EncodedImage:
        is_waiting.set()
        assert await asyncio.to_thread(may_go_on.wait, TIMEOUT_S)
        return await encode(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(EncoderClient, "encode", encode_late)
        answer = asyncio.create_task(ask(decoders[0], ImageRef.from_bytes(file)))
        assert await asyncio.to_thread(is_waiting.wait, TIMEOUT_S)
        with grpc.insecure_channel(fleet.stack.admin_targets[0]) as channel:
            evict = pb.EvictEmbeddingsRequest(keys=[common_pb2.ContentKey(digest=image_digest(file))])
            await asyncio.to_thread(EncoderAdminServiceStub(channel).EvictEmbeddings, evict, timeout=TIMEOUT_S)
        may_go_on.set()
        late = await answer
    assert late.usage.encoded_image_tokens > 0
    await gone_everywhere(decoders, by_digest(file))
    anew = await ask(decoders[0], ImageRef.from_bytes(file))
    assert anew.token_ids == late.token_ids
    assert anew.usage.encoded_image_tokens > 0
    await stored_by_uploads(decoders, file)
