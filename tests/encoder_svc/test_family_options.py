"""Options of some families are part of the key, are refused by other families, and are evicted with their image."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc

from encoder_svc.admin_servicer import EncoderAdminServicer
from encoder_svc.service import open_control
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.tenants import Tenants
from tests.encoder_svc.conftest import StartEncoder, encoder_settings
from tests.encoder_svc.encode_requests import encode_one, failure, key_of, png, request, source

# The handler asks a call for its remaining time only. This one has no deadline.
NO_DEADLINE: Any = SimpleNamespace(time_remaining=lambda: None)


async def test_an_image_beside_others_is_another_entry_and_both_are_evicted(
    start_encoder: StartEncoder, own_redis: EmbeddedRedis, tiny_folder: Callable[[str], pathlib.Path]
) -> None:
    async with start_encoder("llava_onevision", redis_url=own_redis.url) as encoder:
        picture = png(1, 200, 100)
        alone = await encode_one(encoder, picture)
        beside = await encode_one(encoder, picture, beside_others=True)
        assert alone.embedding.num_rows > beside.embedding.num_rows
        assert encoder.metric("lookonce_encoder_encodes_total") == 2
        assert (await encode_one(encoder, picture, beside_others=True)).source == pb.RESULT_SOURCE_LOCAL_CACHE
        for beside_others, found in ((False, alone), (True, beside)):
            lookup = pb.LookupEmbeddingsRequest(keys=[key_of(picture)], beside_others=beside_others)
            answer = await encoder.stub.LookupEmbeddings(lookup)
            assert answer.results[0].embedding.num_rows == found.embedding.num_rows
        settings = encoder_settings(tiny_folder("llava_onevision"), redis_url=own_redis.url)
        async with open_control(settings, encoder.pipeline) as control:
            servicer = EncoderAdminServicer(encoder.pipeline, Tenants(None), control)
            evicted = await servicer.EvictEmbeddings(pb.EvictEmbeddingsRequest(keys=[key_of(picture)]), NO_DEADLINE)
        assert evicted.evicted == 2
        for beside_others in (False, True):
            lookup = pb.LookupEmbeddingsRequest(keys=[key_of(picture)], beside_others=beside_others)
            assert not (await encoder.stub.LookupEmbeddings(lookup)).results[0].cached


async def test_other_families_refuse_it(start_encoder: StartEncoder) -> None:
    async with start_encoder("llava_clip") as encoder:
        code, _, error = await failure(encoder.stub.Encode(request(source(png(1), beside_others=True))))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "leave it unset" in str(error)


async def test_an_image_of_which_nothing_would_be_left_is_refused_before_it_is_decoded(
    start_encoder: StartEncoder,
) -> None:
    async with start_encoder("pixtral") as encoder:
        code, reason, _ = await failure(encoder.stub.Encode(request(source(png(1, 1, 190)))))
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_TOO_LARGE")
        assert (await encode_one(encoder, png(2))).source == pb.RESULT_SOURCE_COMPUTED
