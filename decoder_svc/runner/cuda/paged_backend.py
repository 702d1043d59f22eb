"""What attention backends share that read a step as tensors: pools, writing, and which group a layer is in."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from decoder_svc.runner.attention import AttentionMetadata, LayerOptions, SdpaBackend
from decoder_svc.runner.paged_step import PagedBlocks, PagedStep


class PagedBackend(SdpaBackend):
    """Writes keys and values as the plain backend does; attending is the subclass's."""

    reads_tensors = True

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, options: LayerOptions
    ) -> Tensor:
        """See AttentionBackend."""
        step = metadata.paged
        assert step is not None, "the runner was not told that this backend reads tensors"
        group = self._paged_blocks(layer, step, options)
        for pool, new in zip(self._pools[layer], (key, value), strict=True):
            pool.flatten(0, 1).index_copy_(0, group.slot_mapping, new)
        return self.attend_paged(layer, query, group, step, options)

    def share_pools(self, other: PagedBackend) -> None:
        """Takes the pools of another, to attend to what that one writes."""
        self._pools, self._sliding_layers, self._window = other._pools, other._sliding_layers, other._window

    @abstractmethod
    def attend_paged(
        self, layer: int, query: Tensor, group: PagedBlocks, step: PagedStep, options: LayerOptions
    ) -> Tensor:
        """The second half of `forward`: everything is in the pools, and `group` says where the layer's part is."""

    def _paged_blocks(self, layer: int, step: PagedStep, options: LayerOptions) -> PagedBlocks:
        if layer not in self._sliding_layers:
            return step.full
        assert step.sliding is not None, "layers with a window have blocks of their own"
        assert options.window == self._window, "a layer sees further than its blocks are kept"
        return step.sliding
