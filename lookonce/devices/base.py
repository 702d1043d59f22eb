"""DevicePlatform: the facts about one kind of device that the services ask for. Imports no tensor library.

Everything that a service chooses by the kind of its device comes from here: directly, or through the runner class that
a platform names, which chooses attention, copies and graphs (decoder_svc/runner/base.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Availability:
    """The answer of a platform to the question whether this process can use such a device."""

    is_available: bool
    # The device's name, or the reason why there is none.
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlatform:
    """One kind of device. The fields with defaults are those that a new device can leave out.

    Raises ValueError for values that no device can have.
    """

    # The value of `--device`.
    name: str
    # "module:class" of the decoder's runner for this device, a subclass of ModelRunnerBase. Only decoders import it.
    runner: str
    # Asked once per start, before a model is loaded.
    availability: Callable[[], Availability]
    # Returns the PyTorch device of the vision half. Called only if a device is available.
    torch_device: Callable[[], torch.device]
    # "module:function" that prepares a loaded vision half for its passes, in place; it must also move it if the device
    # has memory of its own. None: the half is moved to `torch_device` as it is. Only encoders import it.
    prepare_vision: str | None = None
    # "module:function" that copies the rows of a pass to main memory, in place of `rows_on_host`
    # (encoder_svc/vision/row_transfer.py). Only encoders import it.
    fetch_rows: str | None = None
    # `--device auto` takes the available device with the highest rank. None: only its name selects this device.
    auto_rank: int | None = None

    # Defaults of settings.

    # Element type where the setting is auto. None: the type of the checkpoint.
    dtype: str | None = None
    # Tokens per KV block.
    block_size: int = 16
    # Share of the memory left by the heaviest step that the KV pool takes.
    kv_cache_memory_share: float = 0.5
    # Whether a decoder's engine has a process of its own, which pays where a step is short for the interpreter that
    # would also serve gRPC.
    engine_process: bool = False
    # Pixel bytes of one forward pass of the vision half. The default holds a pass of eight images, which is the default
    # of max_forward_images, of 576 patches of 16 × 16 pixels in float32 (1.7 MiB each).
    max_forward_bytes: int = 16 * MIB

    # Limits of settings.

    # Every block size must be a multiple of this.
    block_size_multiple: int = 1

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, not None or one of {', '.join(DTYPES)}")
        if self.block_size_multiple < 1 or self.block_size < 1 or self.block_size % self.block_size_multiple:
            raise ValueError(
                f"block_size is {self.block_size}, not a positive multiple of {self.block_size_multiple} tokens"
            )
        if not 0 < self.kv_cache_memory_share <= 1:
            raise ValueError(f"kv_cache_memory_share is {self.kv_cache_memory_share}, not in (0, 1]")
        if self.max_forward_bytes < 1:
            raise ValueError(f"max_forward_bytes is {self.max_forward_bytes}, not at least 1")

    def dtype_for(self, setting: str) -> str | None:
        """Returns the element type for a `--dtype` of auto or a type's name; None means the checkpoint's."""
        return self.dtype if setting == "auto" else setting
