"""Base class of attention backends that read a step as tensors: pools, writing, and the group of a layer."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from decoder_svc.runner.attention import AttentionMetadata, LayerOptions, SdpaBackend
from decoder_svc.runner.paged_step import PagedBlocks, PagedStep


@dataclass(frozen=True, slots=True)
class LayerPools:
    """The pools of one layer."""

    # [blocks, block_size, kv_heads, head_dim]; int8 if they are rounded.
    keys: Tensor
    values: Tensor
    # [blocks, block_size, kv_heads], float32, of rounded pools; else the pools themselves.
    key_scales: Tensor
    value_scales: Tensor

    @property
    def is_rounded(self) -> bool:
        """Whether keys and values are codes with scales."""
        return self.key_scales is not self.keys


class PagedBackend(SdpaBackend):
    """Writes keys and values to the pools; subclasses attend over them."""

    reads_tensors = True
    can_round = False

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, options: LayerOptions
    ) -> Tensor:
        """Implements AttentionBackend.forward: writes to the pools, then calls `attend_paged`."""
        step = metadata.paged
        assert step is not None, "the metadata was built without `paged`, which this backend reads"
        group = self.blocks_of(layer, step, options)
        if layer not in self._reading_layers:
            self._write(layer, key, value, group.slot_mapping)
        return self.attend_paged(layer, query, group, step, options)

    def _write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        key_pool, value_pool = self._pools[layer]
        key_pool.flatten(0, 1).index_copy_(0, slots, key)
        if value_pool is not key_pool:
            value_pool.flatten(0, 1).index_copy_(0, slots, value)

    def share_pools(self, other: PagedBackend) -> None:
        """Uses the pools of another backend, to attend over keys and values that it writes."""
        self._pools, self._sliding_layers, self._window = other._pools, other._sliding_layers, other._window
        self._reading_layers = other._reading_layers

    @abstractmethod
    def attend_paged(
        self, layer: int, query: Tensor, group: PagedBlocks, step: PagedStep, options: LayerOptions
    ) -> Tensor:
        """Attends after keys and values have been written to the pools; `group` is the layer's group."""

    def pools_of(self, layer: int) -> LayerPools:
        """Returns the pools of a layer."""
        keys, values = self._pools[layer]
        return LayerPools(keys, values, keys, values)

    def blocks_of(self, layer: int, step: PagedStep, options: LayerOptions) -> PagedBlocks:
        """Returns the blocks of the group that the layer belongs to."""
        if layer not in self._sliding_layers:
            return step.full
        assert step.sliding is not None, "the step has no blocks of the sliding group"
        assert options.window == self._window, "the layer's window differs from the sliding group's"
        return step.sliding
