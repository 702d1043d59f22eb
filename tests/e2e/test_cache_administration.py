"""Operators remove an image from every cache of every service, pin it, warm it up and look at it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lookonce.aio import AsyncClient
from lookonce.common.v1 import common_pb2
from lookonce.content_key import image_digest
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1.encoder_service_pb2_grpc import EncoderAdminServiceStub, EncoderServiceStub
from lookonce.errors import EmbeddingNotCachedError
from lookonce.images import ImageRef
from lookonce.store.health import PART_NAME
from tests.conftest import DEMO_MODEL, ONE_THREAD
from tests.e2e.pictures import QUESTION, Picture, fresh
from tests.in_process_stack import InProcessStack
from tests.lookonce.store.faults import kill_child

# Far more than anything takes on a busy machine.
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def fleet() -> Iterator[InProcessStack]:
    """Two encoders and two decoders on one cache."""
    with InProcessStack(
        DEMO_MODEL, num_encoders=2, num_decoders=2, encoder_arguments=ONE_THREAD, decoder_arguments=ONE_THREAD
    ) as fleet:
        yield fleet


@pytest.fixture
def admins(fleet: InProcessStack) -> Iterator[list[EncoderAdminServiceStub]]:
    """The operators' service of each encoder."""
    channels = [grpc.insecure_channel(target) for target in fleet.admin_targets]
    yield [EncoderAdminServiceStub(channel) for channel in channels]
    for channel in channels:
        channel.close()


def key(picture: Picture) -> common_pb2.ContentKey:
    return common_pb2.ContentKey(digest=image_digest(picture.data))


def selected(*pictures: Picture) -> pb.EmbeddingSelection:
    return pb.EmbeddingSelection(keys=[key(picture) for picture in pictures])


async def ask(
    fleet: InProcessStack, decoder: int, picture: Picture, *, by_digest: bool = False
) -> tuple[str, int, int]:
    """(answer, encoded rows, cached prompt tokens)."""
    image = ImageRef(image_digest(picture.data)) if by_digest else picture.data
    async with AsyncClient.connect(fleet.decoder_targets[decoder]) as client:
        found = await client.generate(QUESTION, images=[image], max_tokens=16)
    return found.text, found.usage.encoded_image_tokens, found.usage.cached_prompt_tokens


def health_becomes(target: str, name: str, status: Any) -> None:
    """Waits until health says so of a service or part."""
    deadline_s = time.monotonic() + TIMEOUT_S
    with grpc.insecure_channel(target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while health.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S).status != status:
            assert time.monotonic() < deadline_s, f"{name or 'the server'} at {target} never was {status}"
            time.sleep(0.05)


async def refused_everywhere(fleet: InProcessStack, picture: Picture) -> None:
    """Waits until a digest alone does not bring the picture back: neither Redis nor an encoder has it."""
    async with asyncio.timeout(TIMEOUT_S):
        for decoder in range(len(fleet.decoder_targets)):
            while True:
                try:
                    await ask(fleet, decoder, picture, by_digest=True)
                except EmbeddingNotCachedError:
                    break
                await asyncio.sleep(0.05)


async def prefix_is_gone(fleet: InProcessStack, decoder: int, picture: Picture) -> None:
    """Waits until the decoder has heard of it: until then its own prefix of the picture is a hit."""
    async with asyncio.timeout(TIMEOUT_S):
        while (await ask(fleet, decoder, picture))[2] != 0:
            await asyncio.sleep(0.2)


async def ask_until_stored(
    fleet: InProcessStack, admins: list[EncoderAdminServiceStub], decoder: int, picture: Picture
) -> None:
    """Uploads a picture after its removal until the shared cache has it.

    A decoder that has not heard the removal's last message sends the picture on as one that came before the removal.
    """
    request = pb.DescribeEmbeddingsRequest(selection=selected(picture))
    async with asyncio.timeout(TIMEOUT_S):
        await ask(fleet, decoder, picture)
        while not admins[0].DescribeEmbeddings(request, timeout=TIMEOUT_S).results[0].cached:
            await asyncio.sleep(0.05)
            await ask(fleet, decoder, picture)


async def test_an_evicted_image_is_gone_from_every_cache_of_every_service(
    fleet: InProcessStack, admins: list[EncoderAdminServiceStub]
) -> None:
    picture, other = fresh(2)
    for decoder in (0, 1):
        for shown in (picture, other):
            assert (await ask(fleet, decoder, shown))[0] == shown.answer
    for admin in admins:
        admin.PrewarmEmbeddings(pb.PrewarmEmbeddingsRequest(selection=selected(picture)), timeout=TIMEOUT_S)
    assert admins[0].EvictEmbeddings(pb.EvictEmbeddingsRequest(keys=[key(picture)]), timeout=TIMEOUT_S).evicted == 1
    await refused_everywhere(fleet, picture)
    for admin in admins:
        request = pb.DescribeEmbeddingsRequest(selection=selected(picture, other))
        gone, kept = admin.DescribeEmbeddings(request, timeout=TIMEOUT_S).results
        assert (gone.cached, gone.cached_locally, kept.cached) == (False, False, True)
    for target in fleet.encoder_targets:
        with grpc.insecure_channel(target) as channel:
            lookup = pb.LookupEmbeddingsRequest(keys=[key(picture)])
            assert not EncoderServiceStub(channel).LookupEmbeddings(lookup, timeout=TIMEOUT_S).results[0].cached
    answer, num_encoded, _ = await ask(fleet, 1, picture)
    assert (answer, num_encoded > 0) == (picture.answer, True)
    await prefix_is_gone(fleet, 0, picture)
    await ask_until_stored(fleet, admins, 0, picture)
    again = admins[1].EvictEmbeddings(pb.EvictEmbeddingsRequest(keys=[key(picture)] * 2), timeout=TIMEOUT_S)
    assert again.evicted == 1
    assert admins[1].EvictEmbeddings(pb.EvictEmbeddingsRequest(keys=[key(picture)]), timeout=TIMEOUT_S).evicted == 0


async def test_everything_of_the_tenant_goes_and_nothing_of_another(
    fleet: InProcessStack, admins: list[EncoderAdminServiceStub]
) -> None:
    pictures = fresh(3)
    for picture in pictures:
        await ask(fleet, 0, picture)
    nobody = pb.EvictEmbeddingsRequest(tenant="somebody-else", all_of_tenant=True)
    assert admins[0].EvictEmbeddings(nobody, timeout=TIMEOUT_S).evicted == 0
    assert (await ask(fleet, 1, pictures[0]))[1] == 0, "rows of this tenant are still there"
    assert admins[0].EvictEmbeddings(pb.EvictEmbeddingsRequest(all_of_tenant=True), timeout=TIMEOUT_S).evicted >= 3
    for picture in pictures:
        await refused_everywhere(fleet, picture)
    await ask_until_stored(fleet, admins, 0, pictures[0])
    assert admins[1].EvictEmbeddings(pb.EvictEmbeddingsRequest(all=True), timeout=TIMEOUT_S).evicted == 1
    await refused_everywhere(fleet, pictures[0])


async def test_a_pinned_image_does_not_expire_until_it_is_unpinned(
    fleet: InProcessStack, admins: list[EncoderAdminServiceStub]
) -> None:
    pinned, other = fresh(2)
    await ask(fleet, 0, pinned)
    request = pb.PinEmbeddingsRequest(selection=selected(pinned, other))
    assert list(admins[0].PinEmbeddings(request, timeout=TIMEOUT_S).found) == [True, False]
    describe = pb.DescribeEmbeddingsRequest(selection=selected(pinned))
    for _ in range(2):
        found = admins[1].DescribeEmbeddings(describe, timeout=TIMEOUT_S).results[0]
        assert (found.pinned, found.HasField("ttl"), found.size_bytes > 4096) == (True, False, True)
        # A use prolongs a life; one without an end must not get one by that.
        with grpc.insecure_channel(fleet.encoder_targets[0]) as channel:
            touch = pb.LookupEmbeddingsRequest(keys=[key(pinned)], touch=True)
            assert EncoderServiceStub(channel).LookupEmbeddings(touch, timeout=TIMEOUT_S).results[0].cached
    request.unpin = True
    admins[0].PinEmbeddings(request, timeout=TIMEOUT_S)
    found = admins[1].DescribeEmbeddings(describe, timeout=TIMEOUT_S).results[0]
    assert (found.pinned, found.HasField("frequency")) == (False, True)
    assert 0 < found.ttl.seconds <= 86_400


async def test_a_warmed_up_image_is_in_every_encoder_that_was_told_to(
    fleet: InProcessStack, admins: list[EncoderAdminServiceStub]
) -> None:
    picture, unknown = fresh(2)
    await ask(fleet, 0, picture)
    request = pb.PrewarmEmbeddingsRequest(selection=selected(picture, unknown))
    for admin in admins:
        assert list(admin.PrewarmEmbeddings(request, timeout=TIMEOUT_S).found) == [True, False]
        statistics = admin.GetCacheStats(pb.GetCacheStatsRequest(), timeout=TIMEOUT_S)
        assert statistics.local.entries >= 1
        assert 0 < statistics.local.bytes <= statistics.local.capacity_bytes
        assert statistics.shared.entries >= 1
        assert 0 < statistics.shared.bytes <= statistics.shared.capacity_bytes


async def test_a_decoder_that_could_not_hear_it_forgets_when_it_comes_back(
    fleet: InProcessStack, admins: list[EncoderAdminServiceStub]
) -> None:
    (picture,) = fresh(1)
    assert fleet.redis is not None
    await ask(fleet, 0, picture)
    with redis.Redis.from_url(fleet.redis.url) as server:
        server.client_kill_filter(_type="pubsub")
        admins[0].EvictEmbeddings(pb.EvictEmbeddingsRequest(keys=[key(picture)]), timeout=TIMEOUT_S)
    await prefix_is_gone(fleet, 0, picture)


async def test_encoders_that_are_asked_for_it_meanwhile_do_not_bring_it_back(
    fleet: InProcessStack, admins: list[EncoderAdminServiceStub]
) -> None:
    for picture in fresh(4):
        await ask(fleet, 0, picture)
        for admin in admins:
            admin.PrewarmEmbeddings(pb.PrewarmEmbeddingsRequest(selection=selected(picture)), timeout=TIMEOUT_S)
        ended = asyncio.Event()
        askers = [asyncio.create_task(keep_asking(target, picture, ended)) for target in fleet.encoder_targets * 3]
        request = pb.EvictEmbeddingsRequest(keys=[key(picture)])
        await asyncio.to_thread(admins[0].EvictEmbeddings, request, timeout=TIMEOUT_S)
        ended.set()
        await asyncio.gather(*askers)
        for admin in admins:
            found = admin.DescribeEmbeddings(
                pb.DescribeEmbeddingsRequest(selection=selected(picture)), timeout=TIMEOUT_S
            ).results[0]
            assert (found.cached, found.cached_locally) == (False, False)


async def keep_asking(target: str, picture: Picture, ended: asyncio.Event) -> None:
    """References by digest, which an encoder answers from its own copy and, where Redis has lost it, puts back."""
    request = pb.EncodeRequest(items=[pb.EncodeItem(image=common_pb2.ImageSource(key=key(picture)))])
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = EncoderServiceStub(channel)
        while not ended.is_set():
            with contextlib.suppress(grpc.RpcError):
                await stub.Encode(request, timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    "request_",
    [
        pb.EvictEmbeddingsRequest(),
        pb.EvictEmbeddingsRequest(all=True, all_of_tenant=True),
        pb.EvictEmbeddingsRequest(keys=[common_pb2.ContentKey(digest=b"short")]),
        pb.EvictEmbeddingsRequest(keys=[common_pb2.ContentKey(digest=bytes(32))] * 257),
    ],
)
def test_an_empty_selection_is_refused(
    admins: list[EncoderAdminServiceStub], request_: pb.EvictEmbeddingsRequest
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        admins[0].EvictEmbeddings(request_, timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_operators_calls_are_not_served_to_clients(fleet: InProcessStack) -> None:
    with grpc.insecure_channel(fleet.encoder_targets[0]) as channel, pytest.raises(grpc.RpcError) as caught:
        EncoderAdminServiceStub(channel).GetCacheStats(pb.GetCacheStatsRequest(), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_without_redis_an_operator_is_told_that_it_did_not_happen_and_health_says_degraded(
    fleet: InProcessStack, admins: list[EncoderAdminServiceStub]
) -> None:
    assert fleet.redis is not None
    (picture,) = fresh(1)
    kill_child(fleet.redis.pid)
    with pytest.raises(grpc.RpcError) as caught:
        admins[0].EvictEmbeddings(pb.EvictEmbeddingsRequest(keys=[key(picture)]), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    for target in (*fleet.encoder_targets, *fleet.decoder_targets):
        health_becomes(target, PART_NAME, health_pb2.HealthCheckResponse.NOT_SERVING)
        health_becomes(target, "", health_pb2.HealthCheckResponse.SERVING)
    fleet.redis.start()
    for target in (*fleet.encoder_targets, *fleet.decoder_targets):
        health_becomes(target, PART_NAME, health_pb2.HealthCheckResponse.SERVING)
    assert admins[0].EvictEmbeddings(pb.EvictEmbeddingsRequest(keys=[key(picture)]), timeout=TIMEOUT_S).evicted == 0
