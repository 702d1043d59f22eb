"""The native CPU kernel against loops in float64, also in mixed steps; and the fallback where it is not available."""

from __future__ import annotations

import dataclasses
import functools
import mmap
import pathlib
import shutil

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from decoder_svc.runner.attention import AttentionBackend, AttentionMetadata, LayerOptions, SdpaBackend
from decoder_svc.runner.cpu.attention import SOURCES, HostSdpaBackend, NativeBackend, cpu_attention
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from decoder_svc.scheduling.prompt import Span
from decoder_svc.scheduling.window import Window
from lookonce.model.kernels.native_library import library_of_level, load_library
from tests.decoder_svc.runner.attention_reference import Chunk
from tests.decoder_svc.runner.attention_step import (
    LAYER,
    Sizes,
    Step,
    StepCase,
    any_step,
    check_a_wrong_number,
    chunk_of_a_prompt,
)

pytestmark = pytest.mark.usefixtures("library")

NUM_THREADS = 2


class Native(NativeBackend):
    """The kernel with pools copied from pools in token order, as the steps of these tests fill them."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        super().__init__(load_library(SOURCES), num_threads)
        self._plain: list[tuple[Tensor, Tensor]] = []

    def allocate(
        self, spec: KVCacheSpec, num_blocks: int, num_sliding_blocks: int, device: torch.device
    ) -> list[tuple[Tensor, Tensor]]:
        super().allocate(spec, num_blocks, num_sliding_blocks, device)
        self._plain = SdpaBackend().allocate(spec, num_blocks, num_sliding_blocks, device)
        return self._plain

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, options: LayerOptions
    ) -> Tensor:
        self._fill(layer)
        return super().forward(layer, query, key, value, metadata, options)

    def _fill(self, layer: int) -> None:
        for plain, own, arranged in zip(self._plain[layer], self._tensors[layer], (keys_in, values_in), strict=True):
            if arranged is values_in and own is self._tensors[layer][0]:
                continue
            # Slots after a block's last token are never read.
            room = torch.full((len(plain), own.shape[2], *plain.shape[2:]), torch.nan, dtype=plain.dtype)
            room[:, : plain.shape[1]] = plain
            own.copy_(arranged(room).reshape(own.shape))


def keys_in(slots: Tensor) -> Tensor:
    """Reorders `[blocks, slots, heads, dim]` to `[blocks, heads, slots / 16, dim in words, 16, elements of a word]`."""
    per_word = 4 // slots.itemsize
    return slots.unflatten(1, (-1, 16)).unflatten(-1, (-1, per_word)).permute(0, 3, 1, 4, 2, 5)


def values_in(slots: Tensor) -> Tensor:
    """Reorders `[blocks, slots, heads, dim]` to `[blocks, heads, slots in words, dim, elements of a word]`."""
    words = slots.unflatten(1, (-1, 4 // slots.itemsize)).permute(0, 3, 1, 4, 2).clone()
    # The kernel does the same when it writes a token: no NaN may share a word with it.
    is_shared = ~words.isnan().all(dim=-1, keepdim=True)
    return torch.where(is_shared & words.isnan(), 0.0, words)


SIZES = st.builds(
    Sizes,
    block_size=st.sampled_from((2, 4, 10, 16, 18, 32)),
    num_kv_heads=st.integers(1, 3),
    num_groups=st.integers(1, 14),
    head_dim=st.sampled_from((16, 32, 48, 80)),
)


@st.composite
def decoding(draw: st.DrawFn) -> Chunk:
    """Draws a chunk of one new token after any number of cached ones."""
    stop = draw(st.integers(1, 40))
    return Chunk(stop, stop - 1, draw(st.integers(stop - 1, stop)), stop)


any_native_step = any_step(
    torch.float32,
    torch.bfloat16,
    max_chunks=5,
    chunk=decoding() | chunk_of_a_prompt(),
    sizes=SIZES,
    example_sizes=Sizes(head_dim=16),
)


@settings(max_examples=200)
@any_native_step
def test_any_step_equals_the_reference(case: StepCase) -> None:
    case.check(Native)


LATENT_SIZES = st.builds(
    Sizes,
    block_size=st.sampled_from((2, 4, 10, 16, 18, 32)),
    num_kv_heads=st.integers(1, 2),
    num_groups=st.sampled_from((1, 5, 16, 40, 64)),
    head_dim=st.sampled_from((48, 80)),
    value_dim=st.sampled_from((16, 32, 48)),
)


@settings(max_examples=200)
@any_step(
    torch.float32,
    torch.bfloat16,
    max_chunks=5,
    chunk=decoding() | chunk_of_a_prompt(),
    sizes=LATENT_SIZES,
    example_sizes=Sizes(head_dim=48, value_dim=32),
)
def test_values_may_be_parts_of_keys(case: StepCase) -> None:
    case.check(Native)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_heads", "head_dim", "value_dim"), [(32, 320, 256), (64, 576, 512)])
def test_latents_of_published_models_equal_the_reference(
    dtype: torch.dtype, num_heads: int, head_dim: int, value_dim: int
) -> None:
    """Long contexts whose pieces are combined, a chunk of a prompt, and a context with an odd number of tokens."""
    sizes = Sizes(16, 1, num_heads, head_dim, value_dim)
    chunks = [Chunk(stop, stop - 1, stop - 1, stop) for stop in (1, 67, 300)] + [Chunk(40, 36, 36, 40)]
    step = Step(chunks, sizes, 5, dtype, backend=Native)
    assert step.pools[LAYER][0] is step.pools[LAYER][1]
    step.check(LayerOptions(head_dim**-0.5))


def test_prompts_with_latents_do_not_depend_on_how_they_are_cut() -> None:
    sizes, options = Sizes(16, 1, 40, 80, 48), LayerOptions(0.125)
    for dtype in (torch.float32, torch.bfloat16):
        prompt = Step([Chunk(300, 0, 0, 300)], sizes, 5, dtype, backend=Native)
        (wanted,) = prompt.run(options)
        contents = prompt.contents[0]
        for start in (299, 250, 63):
            step = Step([Chunk(300, start, start, 300)], sizes, 9, dtype, backend=Native)
            step.contents[0] = dataclasses.replace(contents, query=contents.query[start:])
            for token in range(start):
                step.pools[LAYER][0][step.tables[0][token // 16], token % 16] = contents.keys[token]
            assert torch.equal(step.run(options)[0], wanted[start:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, Window(300), Window(300, is_chunked=True)])
@pytest.mark.parametrize(("num_kv_heads", "num_groups", "head_dim"), [(3, 3, 64), (1, 8, 256), (8, 1, 80), (2, 7, 32)])
def test_results_of_long_contexts_are_combined_from_pieces(
    dtype: torch.dtype, window: Window | None, num_kv_heads: int, num_groups: int, head_dim: int
) -> None:
    """Lengths around multiples of a piece's 256 tokens, where no block ends with a piece, next to a longer chunk."""
    sizes = Sizes(48, num_kv_heads, num_groups, head_dim)
    stops = (1, 255, 256, 257, 511, 800)
    chunks = [Chunk(stop, stop - 1, stop - 1, stop) for stop in stops] + [Chunk(300, 290, 290, 300)]
    options = LayerOptions(head_dim**-0.5, window)
    outputs = Step(chunks, sizes, 5, dtype, backend=Native).run(options)
    wanted = Step(chunks, sizes, 5, dtype).run(options)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for output, want in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(output.float(), want.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, Window(100), Window(100, is_chunked=True)])
def test_a_tokens_result_does_not_depend_on_the_batch(dtype: torch.dtype, window: Window | None) -> None:
    """Bit-equal with others in the step or alone, in a chunk or as a single token, on any number of threads."""
    num_tokens, sizes, options = 700, Sizes(16, 2, 3, 64), LayerOptions(0.125, window)
    prompt = Step([Chunk(num_tokens, 0, 0, num_tokens)], sizes, 5, dtype, backend=Native)
    (wanted,) = prompt.run(options)
    for start, num_threads, is_alone in (
        (699, 1, True),
        (699, 4, True),
        (699, 2, False),
        (512, 2, False),
        (63, 1, True),
    ):
        others = [] if is_alone else [Chunk(stop, stop - 1, stop - 1, stop) for stop in (1, 300, 29)]
        chunk = Chunk(num_tokens, start, start, num_tokens)
        step = Step([chunk, *others], sizes, 9, dtype, backend=functools.partial(Native, num_threads))
        contents = prompt.contents[0]
        step.contents[0] = dataclasses.replace(contents, query=contents.query[start:])
        for pool, own in zip(step.pools[LAYER], (contents.keys, contents.values), strict=True):
            for token in range(start):
                pool[step.tables[0][token // 16], token % 16] = own[token]
        assert torch.equal(step.run(options)[0], wanted[start:])


def test_large_scores_neither_overflow_nor_vanish() -> None:
    chunk = Chunk(50, 49, 49, 50)
    step, plain = (Step([chunk], Sizes(16, 1, 2, 64), 1, torch.float32, backend=kind) for kind in (Native, SdpaBackend))
    for one in (step, plain):
        one.contents[0].query.mul_(1e4)
    torch.testing.assert_close(step.run(LayerOptions(1.0))[0], plain.run(LayerOptions(1.0))[0])


@pytest.mark.parametrize("sizes", [Sizes(4, 1, 65, 16), Sizes(4, 1, 1, 512), Sizes(4, 3, 11, 256), Sizes(2, 1, 1, 16)])
def test_any_shape_is_taken(sizes: Sizes) -> None:
    Step([Chunk(9, 8, 8, 9)], sizes, 0, torch.float32, backend=Native).check(LayerOptions(0.1))


def test_nan_stays_within_its_request() -> None:
    """A block may hold NaN from a broken request; others must not see it, and the request's own answer must show it."""
    for dtype in (torch.float32, torch.bfloat16):
        chunks = [Chunk(40, 35, 35, 40), Chunk(7, 6, 6, 7)]
        step = Step(chunks, Sizes(16, 1, 2, 16), 3, dtype, backend=Native)
        step.contents[1].query.fill_(torch.nan)
        sound, broken = step.run(LayerOptions(0.25))
        assert sound.isfinite().all()
        assert broken.isnan().all()


def test_arrays_of_a_step_are_not_reused_for_the_next() -> None:
    """Arrays are kept for the layers of one step only, even if the next step looks the same."""
    backend = Native()
    step = Step([Chunk(9, 8, 8, 9), Chunk(5, 4, 4, 5)], Sizes(head_dim=16), 0, torch.float32, backend=lambda: backend)
    step.check(LayerOptions(1.0))
    metadata = step.metadata(is_mutual_beyond_window=False)
    assert backend.step(metadata) is backend.step(metadata)
    assert backend.step(dataclasses.replace(metadata)) is not backend.step(metadata)


def test_slots_and_blocks_outside_of_the_pools_are_refused() -> None:
    """The kernel checks no bounds, so they are checked before it is called."""
    step = Step([Chunk(9, 8, 8, 9)], Sizes(head_dim=16), 0, torch.float32, backend=Native)
    metadata = step.metadata(is_mutual_beyond_window=False)
    group = metadata.full
    (table,) = group.block_tables
    query, new = torch.zeros(1, 4, 16), torch.zeros(1, 2, 16)
    wrong = [
        dataclasses.replace(metadata, full=dataclasses.replace(group, block_tables=(table + 1000,))),
        dataclasses.replace(metadata, full=dataclasses.replace(group, block_tables=(table - 1000,))),
        dataclasses.replace(metadata, full=dataclasses.replace(group, block_tables=(table[:-1],))),
        dataclasses.replace(metadata, full=dataclasses.replace(group, first_keys=(9,))),
        dataclasses.replace(metadata, full=dataclasses.replace(group, slot_mapping=group.slot_mapping + 1000)),
        dataclasses.replace(metadata, full=dataclasses.replace(group, slot_mapping=group.slot_mapping[:0])),
        dataclasses.replace(metadata, query_lens=(0,)),
        dataclasses.replace(metadata, query_lens=(10,)),
        dataclasses.replace(metadata, mutual_spans=((Span(8, 2),),)),
    ]
    for one in wrong:
        with pytest.raises(IndexError):
            step.backend.forward(LAYER, query, new, new, one, LayerOptions(1.0))


def chosen(dtype: torch.dtype = torch.float32, head_dim: int = 64, block_size: int = 16) -> AttentionBackend:
    return cpu_attention(dtype, [head_dim], block_size, NUM_THREADS)


def test_pools_are_mapped_memory_that_starts_on_a_page() -> None:
    backends: tuple[AttentionBackend, ...] = (HostSdpaBackend(), NativeBackend(load_library(SOURCES), NUM_THREADS))
    spec = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=16, dtype=torch.float32, block_size=4)
    for backend in backends:
        pools = [pool for pair in backend.allocate(spec, 5, 5, torch.device("cpu")) for pool in pair]
        assert [pool.data_ptr() % mmap.PAGESIZE for pool in pools] == [0] * 6


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "reason"),
    [
        (torch.float16, 64, 16, "float16"),
        (torch.float32, 72, 16, "not 72"),
        (torch.float32, 592, 16, "not 592"),
        (torch.bfloat16, 64, 5, "not 5"),
    ],
)
def test_unsupported_models_use_pytorch(
    caplog: pytest.LogCaptureFixture, dtype: torch.dtype, head_dim: int, block_size: int, reason: str
) -> None:
    assert type(chosen(dtype, head_dim, block_size)) is HostSdpaBackend
    assert reason in caplog.text


def test_pytorch_is_used_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    library_of_level.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    try:
        assert type(chosen()) is HostSdpaBackend
        assert "there is no C++ compiler" in caplog.text
    finally:
        library_of_level.cache_clear()


def test_pytorch_is_used_without_a_writable_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    library_of_level.cache_clear()
    try:
        assert type(chosen()) is HostSdpaBackend
    finally:
        library_of_level.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("sizes", [Sizes(8, 2, 2, 16), Sizes(4, 1, 6, 48, 32)], ids=["values", "latents"])
@pytest.mark.parametrize("window", [None, Window(5)])
def test_a_token_that_is_no_number_reaches_the_tokens_that_see_it_and_no_others(
    dtype: torch.dtype, wrong: float, part: str, sizes: Sizes, window: Window | None
) -> None:
    check_a_wrong_number(Native, sizes, dtype, part, wrong, window)
