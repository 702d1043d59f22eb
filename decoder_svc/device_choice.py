"""The device of a decoder, and what it decides."""

from __future__ import annotations

from dataclasses import dataclass

from decoder_svc.settings import DecoderSettings
from lookonce.devices.base import DevicePlatform
from lookonce.devices.registry import chosen_platform
from lookonce.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The device of a decoder, and the settings whose defaults are that device's."""

    platform: DevicePlatform
    # Name of the element type; None: the checkpoint's.
    dtype: str | None
    # Tokens per KV block.
    block_size: int
    # Share of the memory left by the heaviest step that the KV pool takes.
    kv_cache_memory_share: float
    # Whether the engine has a process of its own.
    engine_process: bool


def choose_device(settings: DecoderSettings) -> DeviceChoice:
    """Chooses the device. Raises ConfigurationError for one that cannot be used, or that refuses the block size."""
    platform = chosen_platform(settings.device)
    choice = DeviceChoice(
        platform,
        platform.dtype_for(settings.dtype),
        settings.block_size or platform.block_size,
        settings.kv_cache_memory_share or platform.kv_cache_memory_share,
        _has_engine_process(settings, platform),
    )
    if choice.block_size % platform.block_size_multiple:
        raise ConfigurationError(
            f"--block-size: is {choice.block_size}; the device {platform.name} needs a multiple of "
            f"{platform.block_size_multiple}"
        )
    if settings.deterministic and settings.max_num_batched_tokens < choice.block_size:
        raise ConfigurationError(
            f"deterministic needs max_num_batched_tokens={settings.max_num_batched_tokens} to be at least one block, "
            f"block_size={choice.block_size}"
        )
    return choice


def _has_engine_process(settings: DecoderSettings, platform: DevicePlatform) -> bool:
    """An engine whose model is split has a process of its own, which ends when another rank does."""
    if settings.tensor_parallel_size > 1:
        if settings.engine == "thread":
            raise ConfigurationError("engine is thread; tensor_parallel_size needs an engine process: leave engine out")
        return True
    return platform.engine_process if settings.engine == "auto" else settings.engine == "process"
