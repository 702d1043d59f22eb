"""The SDPA backend against loops over every query, head and key in float64.

Metadata comes from the runner's own input batch, as in a real step. Everything that a sequence must not read is NaN,
which a weight of zero would not hide.
"""

from __future__ import annotations

import math
import types
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder_svc.runner.attention import LayerOptions, SdpaBackend, _paged_attention, forward_context
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from decoder_svc.scheduling.prompt import Span
from decoder_svc.scheduling.window import Window
from tests.decoder_svc.runner.attention_reference import Chunk, expected
from tests.decoder_svc.runner.attention_step import (
    LAYER,
    NUM_LAYERS,
    OPTIONS,
    SEEDS,
    SIZES,
    Sizes,
    Step,
    StepCase,
    any_step,
    chunk_of_a_prompt,
)

thorough = settings(max_examples=150)


@thorough
@any_step(torch.float64)
def test_attention_is_the_reference(case: StepCase) -> None:
    case.check(SdpaBackend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, Window(5), Window(5, is_chunked=True)])
def test_results_in_smaller_dtypes_are_within_their_precision(
    dtype: torch.dtype, softcap: float | None, window: Window | None
) -> None:
    chunks = [Chunk(20, 6, 6, 20, (Span(4, 8), Span(14, 3))), Chunk(7, 6, 6, 7), Chunk(9, 0, 0, 9)]
    Step(chunks, Sizes(), 0, dtype).check(LayerOptions(0.5, window, softcap))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("num_new", [1, 4, 10])
def test_a_window_as_long_as_the_context_or_longer_hides_nothing(num_new: int, softcap: float | None) -> None:
    chunk = Chunk(10, 10 - num_new, 10 - num_new, 10)
    plain = Step([chunk], Sizes(), 0).run(LayerOptions(1.0, None, softcap))[0]
    for window in (10, 11, 1000):
        assert torch.equal(Step([chunk], Sizes(), 0).run(LayerOptions(1.0, Window(window), softcap))[0], plain)
    smaller = Step([chunk], Sizes(), 0).run(LayerOptions(1.0, Window(9), softcap))[0]
    differs = (smaller - plain).abs().amax((1, 2)) > 1e-3
    assert differs.tolist() == [False] * (num_new - 1) + [True], "only the last token is ten tokens from the first"


def test_a_window_of_one_token_is_the_token_itself() -> None:
    step = Step([Chunk(6, 2, 2, 6)], Sizes(num_groups=1), 0)
    torch.testing.assert_close(step.run(LayerOptions(1.0, window=Window(1)))[0], step.contents[0].values[2:])


def test_only_tokens_of_a_span_see_later_tokens() -> None:
    """Changing the span's last token changes the results of its span and of all later tokens."""
    chunk = Chunk(10, 0, 0, 10, (Span(2, 4),))
    step, other = Step([chunk], Sizes(), 0), Step([chunk], Sizes(), 0)
    other.contents[0].keys[5] += 1.0
    changed = (step.run(LayerOptions(1.0))[0] != other.run(LayerOptions(1.0))[0]).flatten(1).any(1)
    assert changed.tolist() == [False] * 2 + [True] * 8


def test_spans_after_the_chunk_are_ignored() -> None:
    """The later spans are images that a later step computes."""
    spans = (Span(2, 3), Span(6, 4), Span(12, 2))
    with_later = Step([Chunk(15, 1, 1, 6, spans)], Sizes(), 0).run(LayerOptions(1.0, window=Window(4)))[0]
    assert torch.equal(
        with_later, Step([Chunk(15, 1, 1, 6, spans[:1])], Sizes(), 0).run(LayerOptions(1.0, window=Window(4)))[0]
    )


@thorough
@given(chunks=st.lists(chunk_of_a_prompt(), min_size=2, max_size=4), options=OPTIONS, seed=SEEDS)
def test_blocks_of_other_requests_do_not_change_a_result(chunks: list[Chunk], options: LayerOptions, seed: int) -> None:
    step, other = Step(chunks, Sizes(), seed), Step(chunks, Sizes(), seed)
    own = set(step.tables[0])
    for pool in other.pools[LAYER]:
        for block in set(range(len(pool))) - own:
            pool[block] = 1e3
    for index in range(1, len(chunks)):
        other.contents[index].keys.mul_(-3.0)
        other.contents[index].values.add_(5.0)
    assert torch.equal(step.run(options)[0], other.run(options)[0])


@thorough
@given(chunks=st.lists(chunk_of_a_prompt(), min_size=1, max_size=4), sizes=SIZES, seed=SEEDS)
def test_only_slots_of_new_tokens_are_written(chunks: list[Chunk], sizes: Sizes, seed: int) -> None:
    """Keys and values of cached tokens are not written to their slots, but to the slot that nobody reads."""
    step = Step(chunks, sizes, seed)
    wanted = [(keys.clone(), values.clone()) for keys, values in step.pools]
    for chunk, table, contents in zip(chunks, step.tables, step.contents, strict=True):
        for token in range(chunk.write_start, chunk.stop):
            block, offset = table[token // sizes.block_size], token % sizes.block_size
            wanted[LAYER][0][block, offset] = contents.keys[token]
            wanted[LAYER][1][block, offset] = contents.values[token]
    step.run(LayerOptions(1.0))
    for layer in range(NUM_LAYERS):
        for pool, want in zip(step.pools[layer], wanted[layer], strict=True):
            slots, want_slots = pool.flatten(0, 1), want.flatten(0, 1)
            # The slot that nobody reads may hold anything.
            slots[step.unread_slot] = want_slots[step.unread_slot] = 0.0
            assert torch.equal(slots.nan_to_num(7e7), want_slots.nan_to_num(7e7))


def test_a_sequence_reads_tokens_that_another_writes_in_the_same_step() -> None:
    """A prefix may be shared by a request in the very step that computes it, in any order within the batch."""
    writer, reader = Chunk(8, 0, 0, 8), Chunk(11, 8, 8, 11)
    for order in ((writer, reader), (reader, writer)):
        step = Step(order, Sizes(), 0)
        first, second = order.index(writer), order.index(reader)
        # The reader uses the writer's first two blocks instead of its own.
        step.tables[second] = step.tables[first] + step.tables[second][2:]
        for name in ("keys", "values"):
            getattr(step.contents[second], name)[:8] = getattr(step.contents[first], name)
        step.check(LayerOptions(1.0))


def test_layers_have_pools_of_their_own() -> None:
    backend = SdpaBackend()
    spec = KVCacheSpec(3, 2, 4, torch.bfloat16, 5)
    pools = backend.allocate(spec, 7, 7, torch.device("cpu"))
    assert len({pool.data_ptr() for pair in pools for pool in pair}) == 6
    assert {(pool.shape, pool.dtype) for pair in pools for pool in pair} == {((7, 5, 2, 4), torch.bfloat16)}
    assert sum(pool.nbytes for pair in pools for pool in pair) == 7 * spec.block_bytes


def test_transformers_calls_the_backend_of_the_step() -> None:
    """transformers puts heads before tokens; the layer's own options must arrive."""
    step = Step([Chunk(9, 4, 4, 9)], Sizes(), 0)
    contents = step.contents[0]
    query, keys, values = contents.query, contents.keys[4:], contents.values[4:]
    layer = types.SimpleNamespace(layer_idx=LAYER)
    tensors = (*(part.transpose(0, 1)[None] for part in (query, keys, values)), None)
    with forward_context(step.backend, step.metadata(is_mutual_beyond_window=False)):
        output, weights = _paged_attention(layer, *tensors, scaling=0.5, sliding_window=3, softcap=2.0)
        with pytest.raises(NotImplementedError, match="sinks"):
            _paged_attention(layer, *tensors, scaling=0.5, s_aux=torch.zeros(4))
    wanted = expected(step.chunks[0], contents, LayerOptions(0.5, Window(3), 2.0), is_mutual_beyond_window=False)
    assert weights is None
    torch.testing.assert_close(output[0].double(), wanted, rtol=2e-5, atol=2e-5)
    with pytest.raises(AttributeError):
        _paged_attention(layer, *tensors, scaling=0.5)


def test_the_layers_scale_is_used_instead_of_the_default() -> None:
    """Gemma sets another scale: the layer's own must be used."""
    chunk = Chunk(6, 0, 0, 6)
    outputs = [Step([chunk], Sizes(), 0).run(LayerOptions(scale))[0] for scale in (1 / math.sqrt(4), 2.0)]
    assert not torch.allclose(*outputs)
    Step([replace(chunk, start=3, write_start=3)], Sizes(), 0).check(LayerOptions(2.0))
