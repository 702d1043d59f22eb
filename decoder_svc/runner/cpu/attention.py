"""Attention on the CPU: our native kernel, which reads keys and values in place (native/attention.h), or PyTorch's.

PyTorch's SDPA needs a sequence's keys gathered and uses little of the memory bandwidth in bfloat16.
"""

from __future__ import annotations

import ctypes
import logging
import pathlib
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from decoder_svc.runner.attention import AttentionBackend, AttentionMetadata, LayerOptions, SdpaBackend
from decoder_svc.runner.attention_trial import AttentionTrial
from decoder_svc.runner.cpu.native_step import NativeStep, PoolSizes, native_step
from decoder_svc.runner.cpu.native_structures import Heads, Options, Pools
from decoder_svc.runner.cpu.pool_memory import pool_zeros
from decoder_svc.runner.kv_cache_spec import SCALE_BYTES, KVCacheSpec
from decoder_svc.scheduling.window import Window
from lookonce.model.kernels.kernel_choice import NATIVE, PYTORCH, KernelChoice
from lookonce.model.kernels.kernel_trial import Candidate, choose_kernel
from lookonce.model.kernels.native_compiler import NativeLibraryError
from lookonce.model.kernels.native_level import native_level
from lookonce.model.kernels.native_library import NativeLibrary, load_library

logger = logging.getLogger(__name__)

SOURCES = pathlib.Path(__file__).with_name("native")
# Suffixes of the library's function names.
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_LANES = 16
_MAX_HEAD_DIM = 576


def cpu_attention(
    dtype: torch.dtype, head_dims: Collection[int], block_size: int, num_threads: int
) -> AttentionBackend:
    """Returns the fastest backend that this machine offers for a model with heads of these sizes."""
    reasons = (unsupported_reason(dtype, head_dim, block_size) for head_dim in head_dims)
    reason = next(filter(None, reasons), None)
    if reason is None:
        try:
            backend = NativeBackend(load_library(SOURCES), num_threads)
            if _choice(dtype).implementation == NATIVE:
                logger.info("attention backend native, with kernels of the level %s", native_level().name)
                return backend
            reason = "PyTorch's is faster here"
        except NativeLibraryError as error:
            reason = str(error)
    logger.warning("attention backend sdpa instead of the native kernel: %s", reason)
    return HostSdpaBackend()


def _choice(dtype: torch.dtype) -> KernelChoice:
    """Returns the faster of both for a batch that decodes and a prompt, with heads of a usual shape."""
    spec = KVCacheSpec(num_layers=1, num_kv_heads=4, head_dim=64, dtype=dtype, block_size=16)
    chunks = [(512, 1)] * 8 + [(0, 256)]
    trial = AttentionTrial(spec, 8, chunks, torch.device("cpu"))
    candidates: dict[str, Callable[[], Candidate]] = {
        NATIVE: lambda: trial.prepared(NativeBackend(load_library(SOURCES), 1), has_contents=False),
        PYTORCH: lambda: trial.prepared(HostSdpaBackend(), has_contents=False),
    }
    return choose_kernel(f"attention {DTYPE_NAMES[dtype]}", SOURCES, candidates)


def unsupported_reason(dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Returns why the kernel cannot serve such a model, or None if it can."""
    if dtype not in DTYPE_NAMES:
        return f"the native kernel computes in float32 and bfloat16, not in {dtype}"
    if head_dim % _LANES or head_dim > _MAX_HEAD_DIM:
        return (
            f"the native kernel needs a head size that is a multiple of {_LANES} up to {_MAX_HEAD_DIM}, not {head_dim}"
        )
    if block_size % 2:
        return f"the native kernel needs an even block size, not {block_size}"
    return None


class HostSdpaBackend(SdpaBackend):
    """PyTorch's SDPA over pools that take memory only as they are written."""

    def _pool_zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return pool_zeros(shape, dtype)


class NativeBackend:
    """The native kernel, for float32 and bfloat16. Its pools have another layout than SDPA's: see native/step.h."""

    name = "native"
    reads_tensors = False
    can_round = True

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        """Call only if `unsupported_reason` returned None."""
        self.library = library
        self.num_threads = num_threads
        # A new list for each allocation.
        self.pools: list[Pools] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._sliding_layers: frozenset[int] = frozenset()
        self._window: Window | None = None
        self._sizes = PoolSizes(1, 0, 0)
        # Per layer; those of a group are the same.
        self._heads: list[Heads] = []
        # Layers without keys and values of their own.
        self._reading_layers: frozenset[int] = frozenset()
        self._step: NativeStep | None = None

    def block_slots(self, block_size: int) -> int:
        """Returns `block_size`, rounded up to whole vectors of 16 keys."""
        return -(-block_size // _LANES) * _LANES

    def allocate(
        self, spec: KVCacheSpec, num_blocks: int, num_sliding_blocks: int, device: torch.device
    ) -> list[tuple[Tensor, Tensor]]:
        """Makes pools `[blocks, kv_heads, block_slots, head_dim]`, laid out as in native/step.h.

        Rounded pools are int8, with four more bytes per slot for its scale.
        """
        self._sliding_layers, self._window = spec.sliding_layers, spec.window
        self._reading_layers = frozenset(spec.key_sources)
        self._sizes = PoolSizes(spec.block_size, num_blocks, num_sliding_blocks)
        slots = self.block_slots(spec.block_size)

        def heads(layer: int) -> Heads:
            shape = spec.heads(layer)
            return Heads(
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                block_size=spec.block_size,
                block_slots=slots,
                is_rounded=spec.is_rounded,
                value_dim=shape.value_dim or 0,
            )

        def pool(layer: int) -> Tensor:
            blocks, shape = spec.num_pool_blocks(layer, num_blocks, num_sliding_blocks), spec.heads(layer)
            slot_size = shape.head_dim + SCALE_BYTES if spec.is_rounded else shape.head_dim
            dtype = torch.int8 if spec.is_rounded else spec.dtype
            return pool_zeros((blocks, shape.num_kv_heads, slots, slot_size), dtype)

        self._heads = [heads(layer) for layer in range(spec.num_layers)]
        self._tensors = []
        self._tensors = spec.make_pools(pool)
        self.pools = [
            Pools(keys.data_ptr(), None if values is keys else values.data_ptr()) for keys, values in self._tensors
        ]
        self._step = None
        return self._tensors

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, options: LayerOptions
    ) -> Tensor:
        """Implements AttentionBackend.forward with one call of the kernel."""
        heads = self.heads(layer, query.shape[1])
        output = torch.empty((*query.shape[:2], heads.value_dim or heads.head_dim), dtype=query.dtype)
        written = () if layer in self._reading_layers else (key.contiguous(), value.contiguous())
        tensors = (query.contiguous(), *(written or (None, None)), output)
        function = self.library.function(f"lookonce_attend_{DTYPE_NAMES[query.dtype]}")
        function(
            ctypes.byref(self.step(metadata).struct),
            ctypes.byref(heads),
            ctypes.byref(self.pools[layer]),
            ctypes.byref(self.options(layer, options)),
            *(None if tensor is None else ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
        )
        return output

    def step(self, metadata: AttentionMetadata) -> NativeStep:
        """Returns the step's C++ structure, built once per step. Raises IndexError for blocks outside of the pools."""
        if self._step is None or self._step.metadata is not metadata:
            self._step = native_step(metadata, self._sizes, self.num_threads)
        return self._step

    def heads(self, layer: int, num_heads: int) -> Heads:
        """Returns the shape of a layer's pools with this number of query heads."""
        heads = self._heads[layer]
        heads.num_heads = num_heads
        return heads

    def options(self, layer: int, options: LayerOptions) -> Options:
        """Returns the layer's options, with the group of its blocks."""
        is_sliding = layer in self._sliding_layers
        assert not is_sliding or options.window == self._window, "the layer's window differs from the sliding group's"
        window = options.window
        return Options(
            group=int(is_sliding),
            window=0 if window is None else window.size,
            scale=options.scale,
            softcap=options.softcap or 0.0,
            is_causal=int(options.is_causal),
            is_chunked=int(window is not None and window.is_chunked),
        )
