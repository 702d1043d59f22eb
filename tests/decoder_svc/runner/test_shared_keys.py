"""Layers that read the keys and values of an earlier layer: nothing is written, and only wanted tokens are computed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoder_svc.runner.attention import AttentionBackend, AttentionMetadata, LayerOptions, SdpaBackend
from decoder_svc.runner.cpu.attention import SOURCES, NativeBackend
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from decoder_svc.runner.shared_keys import narrowed
from decoder_svc.scheduling.prompt import Span
from decoder_svc.scheduling.window import Window
from lookonce.model.kernels.native_library import load_library
from lookonce.model.text_support import HeadShape
from tests.decoder_svc.runner.attention_reference import Chunk
from tests.decoder_svc.runner.attention_step import Sizes, Step
from tests.decoder_svc.runner.tensor_backend import TensorBackend
from tests.parity import offline
from tests.parity.families import Conformance

pytestmark = pytest.mark.usefixtures("library")

# Layers 0 and 2 have no window, layers 1 and 3 have one; the last two read what the first two have written.
WINDOW = Window(5)
BLOCK_SIZE = 4
FULL, SLIDING = HeadShape(1, 32), HeadShape(2, 16)
NUM_HEADS = 4
SPEC = KVCacheSpec(
    num_layers=4,
    num_kv_heads=FULL.num_kv_heads,
    head_dim=FULL.head_dim,
    dtype=torch.float32,
    block_size=BLOCK_SIZE,
    sliding_layers=frozenset({1, 3}),
    window=WINDOW,
    sliding_heads=SLIDING,
    key_sources={2: 0, 3: 1},
)
BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "sdpa": SdpaBackend,
    "tensor": TensorBackend,
    "native": lambda: NativeBackend(load_library(SOURCES), 2),
}


class Layers:
    """A step of whole prompts through the layers of SPEC."""

    def __init__(self, name: str, lengths: list[int], spans: list[tuple[Span, ...]], seed: int = 0) -> None:
        chunks = [Chunk(length, 0, 0, length, own) for length, own in zip(lengths, spans, strict=True)]
        step = Step(chunks, Sizes(BLOCK_SIZE), seed, window=WINDOW)
        self.metadata = step.metadata(is_mutual_beyond_window=False)
        self.backend = BACKENDS[name]()
        num_blocks = step.num_blocks + 1
        self.pools = self.backend.allocate(SPEC, num_blocks, num_blocks, torch.device("cpu"))
        self._generator = torch.Generator().manual_seed(seed)
        self.num_tokens = sum(lengths)

    def noise(self, num_heads: int, head_dim: int) -> Tensor:
        return torch.randn(self.num_tokens, num_heads, head_dim, generator=self._generator)

    def new_keys(self, layer: int) -> tuple[Tensor, Tensor]:
        heads = SPEC.heads(layer)
        return self.noise(heads.num_kv_heads, heads.head_dim), self.noise(heads.num_kv_heads, heads.head_dim)

    def attend(
        self, layer: int, query: Tensor, keys: tuple[Tensor, Tensor], metadata: AttentionMetadata | None = None
    ) -> Tensor:
        options = LayerOptions(0.3, WINDOW if layer in SPEC.sliding_layers else None)
        return self.backend.forward(layer, query, *keys, metadata or self.metadata, options)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("writer", "reader"), [(0, 2), (1, 3)])
def test_a_reading_layer_sees_what_the_other_has_written(name: str, writer: int, reader: int) -> None:
    layers = Layers(name, [9, 1, 14], [(), (), (Span(3, 4),)])
    query = layers.noise(NUM_HEADS, SPEC.heads(writer).head_dim)
    expected = layers.attend(writer, query, layers.new_keys(writer))
    contents = [pool.clone() for pool in layers.pools[writer]]
    # Other keys, to be ignored.
    assert torch.equal(layers.attend(reader, query, layers.new_keys(reader)), expected)
    assert all(torch.equal(pool, before) for pool, before in zip(layers.pools[writer], contents, strict=True))


def test_pools_are_shared_and_their_bytes_are_those_of_the_specification() -> None:
    for name, backend in BACKENDS.items():
        spec = SPEC if name != "native" else replace(SPEC, block_slots=16)
        pools = backend().allocate(spec, 3, 5, torch.device("cpu"))
        own = {pool.data_ptr(): pool.nbytes for pair in pools for pool in pair}
        assert len(own) == 4
        assert sum(own.values()) == 3 * spec.block_bytes + 5 * spec.sliding_block_bytes


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(set(BACKENDS) - {"tensor"})),
    lengths=st.lists(st.integers(1, 15), min_size=1, max_size=4),
    layer=st.sampled_from((2, 3)),
    seed=st.integers(0, 1 << 20),
)
def test_the_last_tokens_of_some_sequences_alone_have_the_same_results(
    name: str, lengths: list[int], layer: int, seed: int
) -> None:
    rng = random.Random(seed)
    spans: list[tuple[Span, ...]] = [
        (Span(rng.randrange(length), 1),) if rng.random() < 0.5 else () for length in lengths
    ]
    layers = Layers(name, lengths, spans, seed)
    source = SPEC.key_sources[layer]
    query = layers.noise(NUM_HEADS, SPEC.heads(layer).head_dim)
    layers.attend(source, query, layers.new_keys(source))
    whole = layers.attend(layer, query, layers.new_keys(layer))
    tokens: list[int] = []
    stop = 0
    for length in lengths:
        stop += length
        tokens += range(stop - rng.randint(0, length), stop)
    if not tokens:
        tokens = [stop - 1]
    part = layers.attend(layer, query[tokens], layers.new_keys(layer), narrowed(layers.metadata, tokens))
    torch.testing.assert_close(part, whole[tokens], rtol=1e-5, atol=1e-5)


@pytest.fixture
def gemma4(tiny_family: Callable[[str], Conformance]) -> Conformance:
    return tiny_family("gemma4")


def test_late_layers_compute_only_what_is_sampled(gemma4: Conformance, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = gemma4.offline.runner
    sources = runner.get_kv_cache_spec().key_sources
    counts: dict[bool, list[int]] = {False: [], True: []}
    forward = runner.backend.forward

    @functools.wraps(forward)
    def counting(layer: int, query: Tensor, *others: object) -> Tensor:
        counts[layer in sources].append(len(query))
        return forward(layer, query, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(runner.backend, "forward", counting)
    answers, _, _ = offline.run(gemma4.offline, max_num_batched_tokens=64)
    assert answers == [question.expected for question in gemma4.offline.questions]
    num_requests = len(gemma4.offline.questions)
    assert max(counts[False]) > num_requests >= max(counts[True])
    # A step that samples nothing computes one token there.
    assert min(counts[True]) == 1
