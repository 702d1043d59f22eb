"""One step of random sequences for tests of attention backends, with metadata from the runner's own input batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from decoder_svc.runner.attention import AttentionBackend, AttentionMetadata, BlockMetadata, LayerOptions, SdpaBackend
from decoder_svc.runner.input_batch import BlockInputs, InputBatch
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from decoder_svc.runner.paged_step import paged_step
from decoder_svc.scheduling.prompt import Span
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import AdmittedRequest, ScheduledChunk, SlidingTable
from decoder_svc.scheduling.window import Window
from tests.decoder_svc.runner.attention_reference import Chunk, Contents, expected, sees

LAYER, NUM_LAYERS = 1, 2
# A few rounding errors of the dtype in which scores are summed; soft-capped scores always use float32.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer's heads and of the pool's blocks."""

    block_size: int = 4
    num_kv_heads: int = 2
    num_groups: int = 2
    head_dim: int = 4
    # Values are the first elements of keys, so many of them; None: they are others.
    value_dim: int | None = None


def block_metadata(inputs: BlockInputs) -> BlockMetadata:
    """Builds block metadata as the runner does."""
    tables = tuple(torch.from_numpy(table) for table in inputs.block_tables)
    return BlockMetadata(torch.from_numpy(inputs.slot_mapping), tables, inputs.first_tokens)


class Step:
    """One step of random sequences on a fresh backend. Pools are NaN except for the sequences' context."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        sizes: Sizes,
        seed: int,
        dtype: torch.dtype = torch.float64,
        window: Window | None = None,
        backend: Callable[[], AttentionBackend] = SdpaBackend,
    ) -> None:
        """`window` puts the layer into the sliding group, whose blocks that no token of a chunk sees are released."""
        self.chunks = chunks
        self._window = window
        self._sizes = sizes
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype
        self.contents = [self._random_contents(chunk) for chunk in chunks]
        num_blocks = [-(-chunk.stop // sizes.block_size) for chunk in chunks]
        # Two blocks belong to no sequence.
        order = torch.randperm(sum(num_blocks) + 2, generator=self._generator).tolist()
        self.tables = [tuple(order[sum(num_blocks[:i]) : sum(num_blocks[: i + 1])]) for i in range(len(chunks))]
        self.backend = backend()
        sliding_layers = frozenset() if window is None else frozenset({LAYER})
        spec = KVCacheSpec(
            NUM_LAYERS,
            sizes.num_kv_heads,
            sizes.head_dim,
            dtype,
            sizes.block_size,
            sliding_layers,
            window,
            value_dim=sizes.value_dim,
        )
        self.num_blocks = len(order)
        # One extra block that nobody reads.
        self.pools = self.backend.allocate(spec, len(order) + 1, len(order) + 1, torch.device("cpu"))
        self.unread_slot = len(order) * sizes.block_size
        for pool in (pool for pair in self.pools for pool in pair):
            pool.fill_(torch.nan)
        for chunk, table, contents in zip(chunks, self.tables, self.contents, strict=True):
            for token in range(chunk.write_start):
                block, offset = table[token // sizes.block_size], token % sizes.block_size
                self.pools[LAYER][0][block, offset] = contents.keys[token]
                self.pools[LAYER][1][block, offset] = contents.values[token]

    def _random_contents(self, chunk: Chunk) -> Contents:
        sizes = self._sizes
        query = self.noise(chunk.stop - chunk.start, sizes.num_kv_heads * sizes.num_groups, sizes.head_dim)
        keys = self.noise(chunk.stop, sizes.num_kv_heads, sizes.head_dim)
        return Contents(query, keys, self.noise(*keys.shape) if sizes.value_dim is None else keys)

    def noise(self, *shape: int) -> Tensor:
        """Returns random numbers that give scores far enough apart for every key to matter."""
        return torch.randn(*shape, dtype=torch.float64, generator=self._generator).to(self._dtype)

    def metadata(self, *, is_mutual_beyond_window: bool) -> AttentionMetadata:
        """Builds the step's metadata as the runner does."""
        batch = InputBatch(self._sizes.block_size, 1, has_sliding_group=self._window is not None)
        batch.set_num_blocks(self.num_blocks, self.num_blocks)
        scheduled = []
        for index, (chunk, table) in enumerate(zip(self.chunks, self.tables, strict=True)):
            name = RequestId(str(index))
            token_ids = (0,) * (chunk.num_tokens + chunk.num_generated)
            params = SamplingParams(max_tokens=chunk.num_generated + 1)
            batch.add(AdmittedRequest(name, token_ids, chunk.num_tokens, (), None, chunk.spans, params))
            length = chunk.stop - chunk.start
            sliding = self._sliding_table(chunk, table, is_mutual_beyond_window=is_mutual_beyond_window)
            # The full group gets other blocks than the sliding one, so that mixed-up groups show.
            full = table if sliding is None else table[::-1]
            scheduled.append(ScheduledChunk(name, chunk.start, length, chunk.write_start, 0, full, False, sliding))
            batch[name].set_blocks(scheduled[-1])
        flat = batch.flatten(scheduled)
        return AttentionMetadata(
            full=block_metadata(flat.full),
            sliding=None if flat.sliding is None else block_metadata(flat.sliding),
            query_lens=flat.query_lens,
            kv_lens=flat.kv_lens,
            mutual_spans=flat.mutual_spans,
            is_mutual_beyond_window=is_mutual_beyond_window,
            paged=paged_step(flat, lambda host: host, is_mutual_beyond_window=is_mutual_beyond_window),
        )

    def _sliding_table(
        self, chunk: Chunk, table: tuple[int, ...], *, is_mutual_beyond_window: bool
    ) -> SlidingTable | None:
        if self._window is None:
            return None
        seen = (
            other
            for token in range(chunk.start, chunk.stop)
            for other in range(chunk.stop)
            if sees(token, other, chunk.spans, self._window, is_mutual_beyond_window=is_mutual_beyond_window)
        )
        first = min(seen) // self._sizes.block_size
        return SlidingTable(first, first, table[first:])

    def run(self, options: LayerOptions, *, is_mutual_beyond_window: bool = False) -> list[Tensor]:
        """Returns the backend's result per sequence. Cached tokens come with wrong keys and values, to be ignored."""
        keys, values = [], []
        for chunk, contents in zip(self.chunks, self.contents, strict=True):
            num_cached = chunk.write_start - chunk.start
            cached = (num_cached, *contents.keys.shape[1:])
            keys += [self.noise(*cached), contents.keys[chunk.write_start :]]
            values += [keys[-2] if self._sizes.value_dim else self.noise(*cached), contents.values[chunk.write_start :]]
        query = torch.cat([contents.query for contents in self.contents])
        metadata = self.metadata(is_mutual_beyond_window=is_mutual_beyond_window)
        output = self.backend.forward(LAYER, query, torch.cat(keys), torch.cat(values), metadata, options)
        assert output.dtype == self._dtype
        return list(output.split([chunk.stop - chunk.start for chunk in self.chunks]))

    def check(self, options: LayerOptions, *, is_mutual_beyond_window: bool = False) -> None:
        """Asserts that the backend's result is the reference's."""
        tolerance = TOLERANCES[self._dtype]
        if options.softcap is not None:
            tolerance = max(tolerance, TOLERANCES[torch.float32])
        outputs = self.run(options, is_mutual_beyond_window=is_mutual_beyond_window)
        for chunk, contents, output in zip(self.chunks, self.contents, outputs, strict=True):
            wanted = expected(chunk, contents, options, is_mutual_beyond_window=is_mutual_beyond_window)
            size = self._sizes.value_dim
            torch.testing.assert_close(output[..., :size].double(), wanted[..., :size], rtol=tolerance, atol=tolerance)


@st.composite
def chunk_of_a_prompt(draw: st.DrawFn, *, with_spans: bool = True) -> Chunk:
    """Draws a chunk. It may start inside a span, after a cached prefix, but never ends inside one."""
    spans: list[Span] = []
    end = 0
    for _ in range(draw(st.integers(0, 3)) if with_spans else 0):
        spans.append(Span(end + draw(st.integers(0, 4)), draw(st.integers(1, 6))))
        end = spans[-1].stop
    num_tokens = end + draw(st.integers(0 if spans else 1, 8))
    num_generated = draw(st.integers(0, 3))
    stops = [
        stop
        for stop in range(1, num_tokens + num_generated + 1)
        if not any(span.offset < stop < span.stop for span in spans)
    ]
    stop = draw(st.sampled_from(stops))
    start = draw(st.integers(0, stop - 1))
    return Chunk(num_tokens, start, draw(st.integers(start, stop)), stop, tuple(spans), num_generated)


SIZES = st.builds(
    Sizes,
    block_size=st.integers(1, 5),
    num_kv_heads=st.integers(1, 3),
    num_groups=st.integers(1, 3),
    head_dim=st.sampled_from((2, 4, 8)),
)
OPTIONS = st.builds(
    LayerOptions,
    scale=st.sampled_from((0.25, 1.0)),
    window=st.none() | st.builds(Window, st.integers(1, 30), st.booleans()),
    softcap=st.none() | st.sampled_from((0.5, 3.0)),
    is_causal=st.sampled_from((False, False, True)),
)
SEEDS = st.integers(0, 1 << 30)


@dataclass(frozen=True)
class StepCase:
    """The arguments of a test that holds for any step."""

    chunks: list[Chunk]
    sizes: Sizes
    options: LayerOptions
    is_mutual_beyond_window: bool
    has_sliding_group: bool
    dtype: torch.dtype
    seed: int

    def check(self, backend: Callable[[], AttentionBackend]) -> None:
        """Asserts that the backend's result is the reference's."""
        window = self.options.window if self.has_sliding_group else None
        step = Step(self.chunks, self.sizes, self.seed, self.dtype, window, backend)
        step.check(self.options, is_mutual_beyond_window=self.is_mutual_beyond_window)


# A chunk that starts inside a span longer than the window; a whole prompt and generated tokens; a layer in which the
# span does not count; a chunk that needs only the last blocks of its context and a part of the very last one; and
# tokens of three chunks of the sequence, of which the first begins inside a block.
_EXAMPLES = (
    (Chunk(12, 5, 5, 12, (Span(2, 8),)), LayerOptions(1.0, window=Window(3)), False),
    (Chunk(12, 5, 5, 12, (Span(2, 8),)), LayerOptions(1.0, window=Window(3)), True),
    (Chunk(9, 0, 0, 11, (Span(0, 9),), 2), LayerOptions(1.0, window=Window(2), softcap=3.0), True),
    (Chunk(12, 5, 5, 12, (Span(2, 8),)), LayerOptions(1.0, is_causal=True), False),
    (Chunk(22, 17, 17, 22), LayerOptions(1.0, window=Window(3)), False),
    (Chunk(22, 11, 11, 22), LayerOptions(1.0, window=Window(6, is_chunked=True)), False),
)


def any_step(
    *dtypes: torch.dtype,
    max_chunks: int = 4,
    chunk: st.SearchStrategy[Chunk] | None = None,
    sizes: st.SearchStrategy[Sizes] = SIZES,
    example_sizes: Sizes = Sizes(),
) -> Callable[[Callable[[StepCase], None]], Callable[..., None]]:
    """Decorates a test with random steps of these dtypes, and with fixed steps that are the same for every backend.

    `chunk` replaces the strategy `chunk_of_a_prompt`. `example_sizes` are the sizes of the fixed steps.
    """
    cases = st.builds(
        StepCase,
        chunks=st.lists(chunk_of_a_prompt() if chunk is None else chunk, min_size=1, max_size=max_chunks),
        sizes=sizes,
        options=OPTIONS,
        is_mutual_beyond_window=st.booleans(),
        has_sliding_group=st.booleans(),
        dtype=st.sampled_from(dtypes),
        seed=SEEDS,
    )

    def decorate(test: Callable[[StepCase], None]) -> Callable[..., None]:
        for dtype in dtypes:
            for chunk_of_example, options, is_mutual_beyond_window in _EXAMPLES:
                case = StepCase([chunk_of_example], example_sizes, options, is_mutual_beyond_window, True, dtype, 0)
                test = example(case)(test)
        return given(cases)(test)

    return decorate


def check_a_wrong_number(
    backend: Callable[[], AttentionBackend],
    sizes: Sizes,
    dtype: torch.dtype,
    part: str,
    wrong: float,
    window: Window | None,
) -> None:
    """Has a token with a key or a value that is no finite number reach the tokens that see it, and no others.

    A weight of 0 would not hide it from the tokens before it, whose blocks other requests may share.
    """
    options, place = LayerOptions(0.3, window), 9
    chunks = [Chunk(30, 0, 0, 30), Chunk(12, 0, 0, 12)]
    clean, spoilt = (Step(chunks, sizes, 4, dtype, backend=backend) for _ in range(2))
    getattr(spoilt.contents[0], part)[place, :, 3] = wrong
    expected, found = clean.run(options), spoilt.run(options)
    size = sizes.value_dim
    shows = [window is None or token - place < window.size for token in range(place, 30)]
    is_nan = found[0][..., :size].isnan().flatten(1)
    assert is_nan.all(1).tolist() == is_nan.any(1).tolist() == [False] * place + shows
    kept = ~is_nan.any(1)
    assert torch.equal(found[0][kept][..., :size], expected[0][kept][..., :size])
    assert torch.equal(found[1][..., :size], expected[1][..., :size])
