"""Operators' calls are checked before anything changes, and every change leaves two audit lines, failed ones too."""

from __future__ import annotations

import pathlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from encoder_svc.admin_servicer import EncoderAdminServicer
from encoder_svc.service import open_control
from encoder_svc.servicer import MAX_LOOKUP_KEYS
from lookonce.common.v1 import common_pb2
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.errors import FingerprintMismatchError, InvalidParameterError, UnavailableError
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.tenants import Tenants
from tests.encoder_svc.conftest import RunningEncoder, StartEncoder, encoder_settings
from tests.encoder_svc.encode_requests import encode_one, key_of, png

# An image is kept on a loaded machine, too.
BUDGET_S = 2.0
# The handlers ask a call for its remaining time only. This one has no deadline.
NO_DEADLINE: Any = SimpleNamespace(time_remaining=lambda: None)


@dataclass(frozen=True, slots=True)
class Operated:
    """A running encoder and its operators' service."""

    encoder: RunningEncoder
    servicer: EncoderAdminServicer


@pytest.fixture
async def operated(
    start_encoder: StartEncoder, own_redis: EmbeddedRedis, tiny_folder: Callable[[str], pathlib.Path]
) -> AsyncIterator[Operated]:
    settings = encoder_settings(tiny_folder("llava_clip"), redis_url=own_redis.url, redis_budget_s=BUDGET_S)
    async with (
        start_encoder("llava_clip", redis_url=own_redis.url, redis_budget_s=BUDGET_S) as encoder,
        open_control(settings, encoder.pipeline) as control,
    ):
        yield Operated(encoder, EncoderAdminServicer(encoder.pipeline, Tenants(None), control))


def selection(*pictures: bytes) -> pb.EmbeddingSelection:
    return pb.EmbeddingSelection(keys=[key_of(picture) for picture in pictures])


async def test_an_image_is_described_in_every_tier(operated: Operated) -> None:
    encoded, unknown = png(1), png(2)
    await encode_one(operated.encoder, encoded)
    request = pb.DescribeEmbeddingsRequest(selection=selection(encoded, unknown))
    found = (await operated.servicer.DescribeEmbeddings(request, NO_DEADLINE)).results
    assert [(entry.cached, entry.cached_locally, entry.pinned) for entry in found] == [
        (True, True, False),
        (False, False, False),
    ]
    assert found[0].ttl.ToSeconds() > 0
    assert not found[1].HasField("ttl")


@pytest.mark.parametrize(
    "request_",
    [
        pb.EvictEmbeddingsRequest(),
        pb.EvictEmbeddingsRequest(all=True, all_of_tenant=True),
        pb.EvictEmbeddingsRequest(keys=[key_of(b"a picture")], all=True),
    ],
)
async def test_an_eviction_names_exactly_one_kind_of_images(
    operated: Operated, request_: pb.EvictEmbeddingsRequest
) -> None:
    await encode_one(operated.encoder, png(1))
    with pytest.raises(InvalidParameterError, match="exactly one of"):
        await operated.servicer.EvictEmbeddings(request_, NO_DEADLINE)
    assert (await operated.servicer.GetCacheStats(pb.GetCacheStatsRequest(), NO_DEADLINE)).local.entries == 1


async def test_bad_keys_are_refused_by_name_before_anything_changes(operated: Operated) -> None:
    many = [key_of(b"a picture")] * (MAX_LOOKUP_KEYS + 1)
    for keys, error, words in (
        (many, InvalidParameterError, f"at most {MAX_LOOKUP_KEYS}"),
        ([key_of(b"a picture"), common_pb2.ContentKey(digest=b"short")], InvalidParameterError, r"keys\[1\]"),
        ([key_of(b"a picture", encoder_fingerprint="0" * 64)], FingerprintMismatchError, "another encoder"),
    ):
        request = pb.PinEmbeddingsRequest(selection=pb.EmbeddingSelection(keys=keys))
        with capture_logs() as lines, pytest.raises(error, match=words):
            await operated.servicer.PinEmbeddings(request, NO_DEADLINE)
        assert not [line for line in lines if line["event"].startswith("cache administration")]


@pytest.mark.parametrize("tenant", ["acme ", "a b", "ac/me", "*", "é", "a\n", "a" * 65])
async def test_a_tenant_that_no_token_can_have_is_refused_before_anything_is_said_to_be_forgotten(
    operated: Operated, tenant: str
) -> None:
    chosen = pb.EmbeddingSelection(keys=[key_of(b"a picture")], tenant=tenant)
    calls = (
        (operated.servicer.EvictEmbeddings, pb.EvictEmbeddingsRequest(all_of_tenant=True, tenant=tenant)),
        (operated.servicer.EvictEmbeddings, pb.EvictEmbeddingsRequest(keys=chosen.keys, tenant=tenant)),
        (operated.servicer.PinEmbeddings, pb.PinEmbeddingsRequest(selection=chosen)),
        (operated.servicer.PrewarmEmbeddings, pb.PrewarmEmbeddingsRequest(selection=chosen)),
        (operated.servicer.DescribeEmbeddings, pb.DescribeEmbeddingsRequest(selection=chosen)),
    )
    for method, request in calls:
        with capture_logs() as lines, pytest.raises(InvalidParameterError, match="no tenant can have") as caught:
            await method(request, NO_DEADLINE)  # type: ignore[arg-type]
        assert caught.value.field.endswith("tenant")
        assert not [line for line in lines if line["event"].startswith("cache administration")]


async def test_each_change_is_audited_with_its_result(operated: Operated) -> None:
    await encode_one(operated.encoder, png(1))
    with capture_logs() as lines:
        await operated.servicer.PinEmbeddings(pb.PinEmbeddingsRequest(selection=selection(png(1), png(2))), NO_DEADLINE)
        await operated.servicer.EvictEmbeddings(pb.EvictEmbeddingsRequest(all=True), NO_DEADLINE)
    audited = [line for line in lines if line["event"].startswith("cache administration")]
    assert [(line["action"], line.get("num_images"), line.get("succeeded")) for line in audited] == [
        ("pin", None, None),
        ("pin", 1, True),
        ("evict", None, None),
        ("evict", 1, True),
    ]
    assert {line["tenant"] for line in audited} == {"default"}


async def test_a_change_that_failed_is_audited_as_such(operated: Operated, own_redis: EmbeddedRedis) -> None:
    own_redis.stop()
    with capture_logs() as lines, pytest.raises(UnavailableError):
        await operated.servicer.PinEmbeddings(pb.PinEmbeddingsRequest(selection=selection(png(1))), NO_DEADLINE)
    audited = [line for line in lines if line["event"].startswith("cache administration")]
    assert [line.get("succeeded") for line in audited] == [None, False]
