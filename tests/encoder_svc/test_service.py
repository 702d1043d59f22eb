"""Forward passes are bounded by the settings, and by the device where those are silent."""

from __future__ import annotations

import contextlib
import pathlib

import pytest

from encoder_svc.cache.cache_admin import CacheAdmin
from encoder_svc.service import batch_limits
from lookonce.devices import cpu, cuda
from lookonce.devices.base import MIB, DevicePlatform
from lookonce.forgotten import EVERYTHING
from lookonce.local.redis_server import EmbeddedRedis
from tests.encoder_svc.conftest import StartEncoder, encoder_settings
from tests.encoder_svc.encode_requests import encode_one, png
from tests.example_device.fixed_steps.platform import PLATFORM as EXAMPLE

CPU, CUDA = cpu.PLATFORM, cuda.PLATFORM


@pytest.mark.parametrize(
    ("platform", "wanted", "expected"),
    [
        (CPU, None, 2 * MIB),
        (CUDA, None, 256 * MIB),
        (EXAMPLE, None, 16 * MIB),
        (CPU, 5, 5),
        (CUDA, 5, 5),
        (EXAMPLE, 5, 5),
    ],
)
def test_the_capacity_of_a_pass_follows_from_the_device_unless_it_is_set(
    platform: DevicePlatform, wanted: int | None, expected: int
) -> None:
    settings = encoder_settings(pathlib.Path("model"), max_forward_bytes=wanted)
    assert batch_limits(settings, platform).max_bytes == expected
    assert batch_limits(settings, platform).max_images == settings.max_forward_images > 1


def test_in_deterministic_mode_every_image_has_a_pass_of_its_own() -> None:
    settings = encoder_settings(pathlib.Path("model"), deterministic=True)
    assert batch_limits(settings, CPU).max_images == batch_limits(settings, CUDA).max_images == 1


async def test_a_removal_before_the_start_of_a_process_does_not_concern_its_first_encode(
    start_encoder: StartEncoder, own_redis: EmbeddedRedis
) -> None:
    with contextlib.closing(CacheAdmin(own_redis.url)) as admin:
        admin.tell_to_forget(EVERYTHING)
    async with start_encoder("llava_clip", redis_url=own_redis.url) as encoder:
        result = await encode_one(encoder, png(1))
        assert result.stored
