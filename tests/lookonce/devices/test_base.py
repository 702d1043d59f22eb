"""The facts about a device: values that no device can have are refused, and defaults fit a new device."""

from __future__ import annotations

from typing import Any

import pytest

from lookonce.devices import cpu, cuda
from lookonce.devices.base import MIB, Availability, DevicePlatform


def platform(**fields: Any) -> DevicePlatform:
    """A platform with nothing but what a new device must say."""
    required: dict[str, Any] = {
        "name": "new",
        "runner": "a_module:A",
        "availability": lambda: Availability(True, "a device"),
        "torch_device": lambda: None,
    }
    return DevicePlatform(**{**required, **fields})


def test_a_new_device_has_every_default() -> None:
    made = platform()
    assert (made.dtype, made.block_size, made.kv_cache_memory_share) == (None, 16, 0.5)
    assert made.max_forward_bytes == 16 * MIB
    assert made.prepare_vision is None
    assert made.fetch_rows is None
    assert made.auto_rank is None, "only its name selects it"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "half"}, "dtype is 'half', not None or one of float32, bfloat16, float16"),
        ({"block_size": 24, "block_size_multiple": 16}, "block_size is 24, not a positive multiple of 16 tokens"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size_multiple": 0}, "not a positive multiple of 0"),
        ({"kv_cache_memory_share": 0.0}, r"kv_cache_memory_share is 0.0, not in \(0, 1\]"),
        ({"kv_cache_memory_share": 1.5}, "kv_cache_memory_share is 1.5"),
        ({"max_forward_bytes": 0}, "max_forward_bytes is 0"),
    ],
)
def test_values_that_no_device_can_have_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        platform(**fields)


def test_the_devices_element_type_counts_where_the_setting_is_auto() -> None:
    assert platform().dtype_for("auto") is None
    assert platform(dtype="bfloat16").dtype_for("auto") == "bfloat16"
    assert platform(dtype="bfloat16").dtype_for("float32") == "float32"


def test_our_own_devices_have_their_measured_sizes() -> None:
    assert cpu.PLATFORM.max_forward_bytes == 2 * MIB
    assert cuda.PLATFORM.max_forward_bytes == 256 * MIB
    for made in (cpu.PLATFORM, cuda.PLATFORM):
        assert (made.dtype, made.block_size, made.kv_cache_memory_share) == (None, 16, 0.5)
