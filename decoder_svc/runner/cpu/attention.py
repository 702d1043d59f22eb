"""Attention on the CPU: our own kernel, which reads keys and values where they lie (native/attention.h), or PyTorch's.

PyTorch's SDPA wants a sequence's keys gathered and, in bfloat16, leaves most of the memory's speed unused.
"""

from __future__ import annotations

import ctypes
import logging
import pathlib

import torch
from torch import Tensor

from decoder_svc.runner.attention import AttentionBackend, AttentionMetadata, KVCacheSpec, LayerOptions, SdpaBackend
from decoder_svc.runner.cpu.native_step import NativeStep, PoolSizes, native_step
from decoder_svc.runner.cpu.native_structures import Heads, Options, Pools
from decoder_svc.runner.pool_memory import pool_zeros
from lookonce.model.native_library import NativeLibrary, NativeLibraryError, load_library

logger = logging.getLogger(__name__)

SOURCES = pathlib.Path(__file__).with_name("native")
# Of the functions in the library.
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_LANES = 16
_MAX_HEAD_DIM = 512


def cpu_attention(dtype: torch.dtype, head_dim: int, block_size: int, num_threads: int) -> AttentionBackend:
    """The fastest that this machine has for such a model."""
    reason = unsupported(dtype, head_dim, block_size)
    if reason is None:
        try:
            return NativeBackend(load_library(SOURCES), num_threads)
        except NativeLibraryError as error:
            reason = str(error)
    logger.warning("attention backend sdpa, which is slower: %s", reason)
    return SdpaBackend()


def unsupported(dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why the kernel cannot serve such a model; None when it can."""
    if dtype not in DTYPE_NAMES:
        return f"the kernel knows float32 and bfloat16, not {dtype}"
    if head_dim % _LANES or head_dim > _MAX_HEAD_DIM:
        return f"the kernel wants heads of a multiple of {_LANES} elements up to {_MAX_HEAD_DIM}, not {head_dim}"
    if block_size % 2:
        return f"the kernel wants an even number of tokens in a block, not {block_size}"
    return None


class NativeBackend:
    """The kernel, for float32 and bfloat16. Its pools are not laid out as SDPA's: see native/step.h."""

    name = "native"
    reads_tensors = False

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        """Raises nothing: `unsupported` has been asked."""
        self.library = library
        self.num_threads = num_threads
        # Replaced whenever the pools are.
        self.pools: list[Pools] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._sliding_layers: frozenset[int] = frozenset()
        self._window: int | None = None
        self._sizes = PoolSizes(1, 0, 0)
        self._heads = Heads()
        self._step: NativeStep | None = None

    def block_slots(self, block_size: int) -> int:
        """Whole vectors of 16 keys."""
        return -(-block_size // _LANES) * _LANES

    def allocate(
        self, spec: KVCacheSpec, num_blocks: int, num_sliding_blocks: int, device: torch.device
    ) -> list[tuple[Tensor, Tensor]]:
        """Pools of `[blocks, kv_heads, block_slots, head_dim]` elements, in the order of native/step.h."""
        self._sliding_layers, self._window = spec.sliding_layers, spec.window
        self._sizes = PoolSizes(spec.block_size, num_blocks, num_sliding_blocks)
        slots = self.block_slots(spec.block_size)
        self._heads = Heads(
            num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, block_size=spec.block_size, block_slots=slots
        )

        def pool(layer: int) -> Tensor:
            blocks = num_sliding_blocks if layer in spec.sliding_layers else num_blocks
            return pool_zeros((blocks, spec.num_kv_heads, slots, spec.head_dim), spec.dtype, device)

        self._tensors = []
        self._tensors = [(pool(layer), pool(layer)) for layer in range(spec.num_layers)]
        self.pools = [Pools(keys.data_ptr(), values.data_ptr()) for keys, values in self._tensors]
        self._step = None
        return self._tensors

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, options: LayerOptions
    ) -> Tensor:
        """See AttentionBackend."""
        output = torch.empty(query.shape, dtype=query.dtype)
        tensors = (query.contiguous(), key.contiguous(), value.contiguous(), output)
        function = self.library.function(f"lookonce_attend_{DTYPE_NAMES[query.dtype]}")
        function(
            ctypes.byref(self.step(metadata).struct),
            ctypes.byref(self.heads(query.shape[1])),
            ctypes.byref(self.pools[layer]),
            ctypes.byref(self.options(layer, options)),
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
        )
        return output

    def step(self, metadata: AttentionMetadata) -> NativeStep:
        """Made for the first layer of a step. Raises IndexError for what lies outside of the pools."""
        if self._step is None or self._step.metadata is not metadata:
            self._step = native_step(metadata, self._sizes, self.num_threads)
        return self._step

    def heads(self, num_heads: int) -> Heads:
        """The pools' shapes, and as many heads of queries."""
        self._heads.num_heads = num_heads
        return self._heads

    def options(self, layer: int, options: LayerOptions) -> Options:
        """With the group that the layer's blocks are in."""
        is_sliding = layer in self._sliding_layers
        assert not is_sliding or options.window == self._window, "a layer sees further than its blocks are kept"
        return Options(int(is_sliding), options.window or 0, options.scale, options.softcap or 0.0)
