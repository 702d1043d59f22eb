"""The base of backends that read tensors: writing, the group of a layer, and pools shared with another backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decoder_svc.runner.attention import LayerOptions
from decoder_svc.runner.cuda.paged_backend import PagedBackend
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from decoder_svc.runner.paged_step import PagedBlocks, PagedStep
from decoder_svc.scheduling.window import Window
from tests.decoder_svc.runner.attention_reference import Chunk
from tests.decoder_svc.runner.attention_step import LAYER, NUM_LAYERS, Sizes, Step

CPU = torch.device("cpu")
CHUNKS = [Chunk(9, 4, 4, 9), Chunk(6, 5, 5, 6)]


class Noting(PagedBackend):
    """Attends to nothing; notes the blocks that it was given."""

    name = "noting"

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[PagedBlocks] = []

    def attend_paged(
        self, layer: int, query: Tensor, group: PagedBlocks, step: PagedStep, options: LayerOptions
    ) -> Tensor:
        self.groups.append(group)
        return query


def test_new_keys_and_values_are_in_the_pools_before_attention() -> None:
    step = Step(CHUNKS, Sizes(), 0, backend=Noting)
    step.run(LayerOptions(1.0))
    for chunk, table, contents in zip(CHUNKS, step.tables, step.contents, strict=True):
        for token in range(chunk.start, chunk.stop):
            block, offset = table[token // 4], token % 4
            assert torch.equal(step.pools[LAYER][0][block, offset], contents.keys[token])
            assert torch.equal(step.pools[LAYER][1][block, offset], contents.values[token])


def test_a_layer_gets_the_blocks_of_its_group() -> None:
    step = Step(CHUNKS, Sizes(), 0, window=Window(3), backend=Noting)
    metadata = step.metadata(is_mutual_beyond_window=False)
    assert metadata.paged is not None
    query, new = step.noise(6, 4, 4), step.noise(6, 2, 4)
    other_layer = next(layer for layer in range(NUM_LAYERS) if layer != LAYER)
    step.backend.forward(LAYER, query, new, new, metadata, LayerOptions(1.0, window=Window(3)))
    step.backend.forward(other_layer, query, new, new, metadata, LayerOptions(1.0))
    assert isinstance(step.backend, Noting)
    assert step.backend.groups == [metadata.paged.sliding, metadata.paged.full]


def test_a_window_other_than_the_sliding_groups_is_refused() -> None:
    step = Step(CHUNKS, Sizes(), 0, window=Window(3), backend=Noting)
    with pytest.raises(AssertionError, match="window"):
        step.run(LayerOptions(1.0, window=Window(4)))


def test_metadata_without_tensors_is_refused() -> None:
    step = Step(CHUNKS, Sizes(), 0, backend=Noting)
    metadata = replace(step.metadata(is_mutual_beyond_window=False), paged=None)
    new = step.noise(6, 2, 4)
    with pytest.raises(AssertionError, match="paged"):
        step.backend.forward(LAYER, step.noise(6, 4, 4), new, new, metadata, LayerOptions(1.0))


def test_shared_pools_are_the_same_memory() -> None:
    one, other = Noting(), Noting()
    spec = KVCacheSpec(NUM_LAYERS, 2, 4, torch.float32, 4, frozenset({LAYER}), Window(3))
    pools = one.allocate(spec, 3, 2, CPU)
    other.share_pools(one)
    assert [key.data_ptr() for key, _ in other._pools] == [key.data_ptr() for key, _ in pools]
    assert (other._sliding_layers, other._window) == (frozenset({LAYER}), Window(3))
