"""A decoder uses rows of its own model's encoders only, whatever else is behind the encoder's target.

Two folders with equal configurations and different weights stand for two revisions of a model.
"""

from __future__ import annotations

import asyncio
import pathlib
import shutil
from typing import Any

import grpc
import pytest
import safetensors.torch

from lookonce import status_codes
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.errors import FingerprintMismatchError
from lookonce.local.redis_server import EmbeddedRedis
from tests import image_files, tiny_models
from tests.decoder_svc.decoders import RunningDecoder, params, running_decoder, source
from tests.decoder_svc.encoders import running_encoder


@pytest.fixture(scope="module")
def revisions(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    folder = tmp_path_factory.mktemp("revisions")
    return tiny_models.build_llava_clip(folder / "a", seed=0), tiny_models.build_llava_clip(folder / "b", seed=1)


def picture(seed: int) -> bytes:
    return image_files.encoded(image_files.noise(seed, 70, 60))


PICTURES = [picture(seed) for seed in range(100, 108)]


async def answer(decoder: RunningDecoder, data: bytes) -> list[int]:
    request = params("what is it", source(data), max_tokens=6, ignore_eos=True, temperature=0.0)
    # The vision half is hashed in a process of its own, whose start takes a minute on a busy machine.
    response = await decoder.stub.Generate(pb.GenerateRequest(params=request), timeout=300)
    return list(response.choices[0].token_ids)


async def expected_answers(folder: pathlib.Path, pictures: list[bytes]) -> list[list[int]]:
    """Answers of a decoder and an encoder that serve only this folder."""
    async with running_encoder(folder) as target, running_decoder(folder, target) as decoder:
        return [await answer(decoder, data) for data in pictures]


@pytest.fixture(scope="module")
def expected(revisions: tuple[pathlib.Path, pathlib.Path]) -> dict[str, list[list[int]]]:
    """Each revision's answers to PICTURES."""
    found = (asyncio.run(expected_answers(folder, PICTURES)) for folder in revisions)
    return dict(zip("ab", found, strict=True))


async def test_rows_of_another_revision_are_refused_and_the_decoder_is_not_ready(
    revisions: tuple[pathlib.Path, pathlib.Path], shared_redis: EmbeddedRedis
) -> None:
    a, b = revisions
    async with (
        running_encoder(a, redis_url=shared_redis.url) as target,
        running_decoder(b, target, redis_url=shared_redis.url) as decoder,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(decoder, picture(1))
        error = status_codes.from_rpc_error(caught.value)
        assert isinstance(error, FingerprintMismatchError)
        assert "other vision weights" in error.message
        assert not decoder.service.is_ready()
        text = params("what is it", max_tokens=2, ignore_eos=True)
        assert await decoder.stub.Generate(pb.GenerateRequest(params=text), timeout=60)


@pytest.mark.parametrize("order", ["ab", "ba"])
async def test_behind_one_target_each_decoder_uses_its_own_revision(
    revisions: tuple[pathlib.Path, pathlib.Path],
    expected: dict[str, list[list[int]]],
    shared_redis: EmbeddedRedis,
    order: str,
) -> None:
    assert expected["a"] != expected["b"]
    redis: dict[str, Any] = {"redis_url": shared_redis.url}
    a, b = revisions if order == "ab" else revisions[::-1]
    async with running_encoder(a, **redis) as first, running_encoder(b, **redis) as second:
        target = f"ipv4:{first},{second}"
        for name, folder in zip("ab", revisions, strict=True):
            async with running_decoder(folder, target, **redis) as decoder:
                answers = await asyncio.gather(*(answer(decoder, data) for data in PICTURES))
                assert answers == expected[name]
                assert decoder.service.is_ready()


async def test_a_decoder_finds_its_revision_when_that_starts_later(
    revisions: tuple[pathlib.Path, pathlib.Path],
) -> None:
    a, b = revisions
    async with running_encoder(a) as old, running_encoder(b) as placeholder:
        port = placeholder.rpartition(":")[2]
        target = f"ipv4:{old},127.0.0.1:{port}"
        async with running_decoder(a, target) as decoder_a:
            assert await answer(decoder_a, picture(2))
    async with running_encoder(a) as old, running_decoder(b, f"ipv4:{old},127.0.0.1:{port}") as decoder:
        async with asyncio.timeout(30):
            while not decoder.service.search or not decoder.service.search._encoder.has_only_strangers:
                await asyncio.sleep(0.02)
        assert not decoder.service.is_ready()
        async with running_encoder(b, listen=f"127.0.0.1:{port}"), asyncio.timeout(30):
            while not decoder.service.is_ready():
                await asyncio.sleep(0.02)
            assert await answer(decoder, picture(2)) == (await expected_answers(b, [picture(2)]))[0]


async def test_an_encoder_with_int8_rows_belongs_to_the_same_folder(
    revisions: tuple[pathlib.Path, pathlib.Path],
) -> None:
    a, _ = revisions
    async with running_encoder(a, row_format="int8") as target, running_decoder(a, target) as decoder:
        assert await answer(decoder, picture(3))


async def test_an_encoder_with_another_element_type_belongs_to_the_same_folder_and_to_no_other(
    revisions: tuple[pathlib.Path, pathlib.Path],
) -> None:
    a, b = revisions
    async with running_encoder(a, dtype="bfloat16") as target:
        async with running_decoder(a, target) as decoder:
            assert await answer(decoder, picture(3))
        async with running_decoder(b, target) as decoder:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer(decoder, picture(3))
            assert isinstance(status_codes.from_rpc_error(caught.value), FingerprintMismatchError)


async def test_language_models_with_the_same_vision_half_share_an_encoder(
    revisions: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    a, _ = revisions
    sibling = shutil.copytree(a, tmp_path / "sibling")
    weights = safetensors.torch.load_file(sibling / "model.safetensors")
    head = next(name for name in weights if "lm_head" in name)
    weights[head] = weights[head].flip(0).contiguous()
    safetensors.torch.save_file(weights, sibling / "model.safetensors", {"format": "pt"})
    async with running_encoder(a) as target, running_decoder(sibling, target) as decoder:
        assert await answer(decoder, picture(4)) != (await expected_answers(a, [picture(4)]))[0]
