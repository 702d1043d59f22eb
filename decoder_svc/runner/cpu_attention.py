"""Attention on the CPU: single tokens, which are all of a decode step, by our own kernel; longer chunks by PyTorch.

PyTorch's SDPA wants a sequence's keys gathered and, in bfloat16, leaves most of the memory's speed unused; the kernel
reads them where they lie (paged_attention.cpp).
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decoder_svc.runner.attention import (
    AttentionBackend,
    AttentionMetadata,
    BlockMetadata,
    KVCacheSpec,
    LayerOptions,
    SdpaBackend,
)
from decoder_svc.runner.native_library import NativeLibraryError, load_library

logger = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int64]
_FUNCTIONS = {torch.float32: "lookonce_decode_float32", torch.bfloat16: "lookonce_decode_bfloat16"}


def cpu_attention() -> AttentionBackend:
    """The fastest that this machine has."""
    try:
        library = load_library()
    except NativeLibraryError as error:
        logger.warning("attention backend sdpa, slower at decoding: %s", error)
        return SdpaBackend()
    return NativeBackend(library)


class _DecodeStep(ctypes.Structure):
    _fields_ = (
        ("blocks", ctypes.c_void_p),
        ("first_blocks", ctypes.c_void_p),
        ("first_keys", ctypes.c_void_p),
        ("num_keys", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("num_sequences", ctypes.c_int64),
    )


class _DecodeLayer(ctypes.Structure):
    _fields_ = (
        ("num_kv_heads", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("query_row_stride", ctypes.c_int64),
        ("query_head_stride", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class _Decodes:
    """The sequences of a step with one new token each, in one group of layers."""

    step: _DecodeStep
    # What `step` points into.
    arrays: tuple[IntArray, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one step is divided; the same for all layers of a group."""

    metadata: AttentionMetadata
    # Indexes of the sequences for the kernel, and for PyTorch.
    single: tuple[int, ...]
    longer: frozenset[int]
    full: _Decodes
    sliding: _Decodes | None


class NativeBackend(SdpaBackend):
    """SDPA, but for single tokens in float32 and bfloat16."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library
        for name in _FUNCTIONS.values():
            function = getattr(library, name)
            function.restype = None
            function.argtypes = [ctypes.POINTER(_DecodeStep), ctypes.POINTER(_DecodeLayer), *[ctypes.c_void_p] * 4]
        self._plan: _Plan | None = None
        self._block_size = 0
        # Blocks of the pools of each group.
        self._num_blocks = self._num_sliding_blocks = 0

    def allocate(
        self, spec: KVCacheSpec, num_blocks: int, num_sliding_blocks: int, device: torch.device
    ) -> list[tuple[Tensor, Tensor]]:
        """As SDPA's: `[blocks, block_size, kv_heads, head_dim]`."""
        self._block_size = spec.block_size
        self._num_blocks, self._num_sliding_blocks = num_blocks, num_sliding_blocks
        return super().allocate(spec, num_blocks, num_sliding_blocks, device)

    def attend(
        self, layer: int, query: Tensor, group: BlockMetadata, metadata: AttentionMetadata, options: LayerOptions
    ) -> Tensor:
        """See SdpaBackend."""
        keys, values = self._pools[layer]
        num_kv_heads, head_dim = keys.shape[2:]
        function = _FUNCTIONS.get(query.dtype)
        if function is None or query.stride(2) != 1:
            return super().attend(layer, query, group, metadata, options)
        plan = self._planned(metadata)
        output = torch.empty(query.shape, dtype=query.dtype)
        if plan.longer:
            self._attend_by_sdpa(layer, query, group, metadata, options, plan.longer, output)
        if plan.single:
            decodes = plan.full if group is metadata.full else plan.sliding
            assert decodes is not None, "layers with a window have blocks of their own"
            shape = _DecodeLayer(
                num_kv_heads=num_kv_heads,
                num_groups=query.shape[1] // num_kv_heads,
                head_dim=head_dim,
                block_size=self._block_size,
                query_row_stride=query.stride(0),
                query_head_stride=query.stride(1),
                window=options.window or 0,
                scale=options.scale,
                softcap=options.softcap or 0.0,
            )
            getattr(self._library, function)(
                decodes.step, shape, query.data_ptr(), keys.data_ptr(), values.data_ptr(), output.data_ptr()
            )
        return output

    def _planned(self, metadata: AttentionMetadata) -> _Plan:
        """Made for the first layer of a step."""
        if self._plan is None or self._plan.metadata is not metadata:
            is_single = [
                length == 1 and not spans
                for length, spans in zip(metadata.query_lens, metadata.mutual_spans, strict=True)
            ]
            single = tuple(itertools.compress(range(len(is_single)), is_single))
            longer = frozenset(range(len(is_single))) - frozenset(single)
            full = self._decodes(metadata.full, metadata, single, self._num_blocks)
            sliding = None
            if metadata.sliding is not None:
                sliding = self._decodes(metadata.sliding, metadata, single, self._num_sliding_blocks)
            self._plan = _Plan(metadata, single, longer, full, sliding)
        return self._plan

    def _decodes(
        self, group: BlockMetadata, metadata: AttentionMetadata, single: Sequence[int], num_blocks: int
    ) -> _Decodes:
        """Raises IndexError for what lies outside of the pools: the kernel looks at no bounds."""
        decodes = _decodes(group, metadata, single)
        blocks, first_blocks, first_keys, num_keys, _ = decodes.arrays
        num_slots = np.diff(first_blocks, append=len(blocks)) * self._block_size
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < num_blocks:
            raise IndexError(f"blocks {blocks.min()} … {blocks.max()} of {num_blocks}")
        if (first_keys < 0).any() or (num_keys <= first_keys).any() or (num_keys - first_keys > num_slots).any():
            raise IndexError("a sequence has more keys than its blocks hold, or none")
        return decodes


def _decodes(group: BlockMetadata, metadata: AttentionMetadata, single: Sequence[int]) -> _Decodes:
    tables = [group.block_tables[index].numpy() for index in single]
    rows = np.cumsum((0, *metadata.query_lens))[:-1]
    arrays: tuple[IntArray, ...] = (
        np.concatenate(tables) if tables else np.zeros(0, dtype=np.int64),
        np.cumsum([0, *(len(table) for table in tables)], dtype=np.int64)[:-1],
        np.array([group.first_keys[index] for index in single], dtype=np.int64),
        np.array([metadata.kv_lens[index] for index in single], dtype=np.int64),
        np.ascontiguousarray(rows[list(single)], dtype=np.int64),
    )
    return _Decodes(_DecodeStep(*(array.ctypes.data for array in arrays), len(single)), arrays)
