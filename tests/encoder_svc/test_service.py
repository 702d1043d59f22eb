"""Forward passes are bounded by the settings, and by the device where those are silent."""

from __future__ import annotations

import pathlib

import pytest

from encoder_svc.service import batch_limits
from lookonce.devices import cpu, cuda
from lookonce.devices.base import MIB, DevicePlatform
from tests.encoder_svc.conftest import encoder_settings
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
