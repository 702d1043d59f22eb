"""The Triton kernel, run by Triton's interpreter, against loops over every query, head and key in float64."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from decoder_svc.runner.attention import LayerOptions
from decoder_svc.scheduling.prompt import Span
from decoder_svc.scheduling.window import Window
from tests.decoder_svc.runner.attention_reference import Chunk
from tests.decoder_svc.runner.attention_step import (
    OPTIONS,
    SEEDS,
    SIZES,
    Sizes,
    Step,
    StepCase,
    any_step,
    check_a_wrong_number,
)
from tests.decoder_svc.runner.cuda.interpreted_triton import (
    COMPILED_FOLDER,
    FEW,
    SOME,
    Tile,
    interpreted,
    latent_tile_of,
    tile_of,
)

# The heads of Mistral Small 4 and of Kimi K2.5, whose values are parts of keys.
MISTRAL, KIMI = Sizes(16, 1, 32, 320, 256), Sizes(16, 1, 64, 576, 512)
# One key head for any number of heads. Latents and rotary keys are padded, or are not.
LATENTS = st.builds(
    Sizes,
    block_size=st.integers(1, 5),
    num_kv_heads=st.just(1),
    num_groups=st.integers(1, 6),
    head_dim=st.sampled_from((21, 32, 40)),
    value_dim=st.sampled_from((5, 16, 20)),
)


def decode(num_tokens: int) -> Chunk:
    return Chunk(num_tokens, num_tokens - 1, num_tokens - 1, num_tokens)


# Few examples: the interpreter takes some milliseconds per program.
@settings(max_examples=40)
@any_step(torch.float32, max_chunks=3)
def test_any_step_equals_the_reference(case: StepCase) -> None:
    case.check(interpreted)


@settings(max_examples=25)
@any_step(torch.float32, max_chunks=3, sizes=LATENTS, example_sizes=Sizes(4, 1, 3, 24, 16))
def test_any_step_over_latents_equals_the_reference(case: StepCase) -> None:
    case.check(interpreted)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=2),
    sizes=SIZES,
    options=OPTIONS,
    has_sliding_group=st.booleans(),
    num_processors=st.sampled_from((8, SOME)),
    seed=SEEDS,
)
@example([1, 400], Sizes(), LayerOptions(1.0), False, SOME, 0)
def test_split_keys_give_the_reference_results(
    lengths: list[int], sizes: Sizes, options: LayerOptions, has_sliding_group: bool, num_processors: int, seed: int
) -> None:
    """With a window, some parts have no keys."""
    window = options.window if has_sliding_group else None
    backend = functools.partial(interpreted, num_processors)
    step = Step([decode(length) for length in lengths], sizes, seed, torch.float32, window=window, backend=backend)
    step.check(options)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, Window(50), Window(50, is_chunked=True)])
def test_chunks_longer_than_a_tile_and_contexts_longer_than_a_tile_of_keys(
    softcap: float | None, window: Window | None
) -> None:
    """Tiles start inside spans, and a sequence's last tile is not full."""
    chunks = [Chunk(150, 20, 20, 150, (Span(10, 45), Span(70, 60))), decode(90), Chunk(33, 0, 0, 33)]
    step = Step(chunks, Sizes(16, 2, 3, 16), 1, torch.float32, backend=interpreted)
    step.check(LayerOptions(0.25, window, softcap))


@pytest.mark.parametrize("num_processors", [FEW, SOME])
def test_float16_results_are_within_its_precision(num_processors: int) -> None:
    """float16 replaces bfloat16, which the interpreter does not support."""
    backend = functools.partial(interpreted, num_processors)
    for chunks in ([Chunk(20, 6, 6, 20, (Span(4, 8), Span(14, 3))), decode(7)], [decode(100), decode(3)]):
        Step(chunks, Sizes(16, 2, 2, 64), 0, torch.float16, backend=backend).check(LayerOptions(0.125, Window(30), 3.0))


@pytest.mark.parametrize("sizes", [Sizes(16, 1, 7, 80), Sizes(256, 2, 1, 40), Sizes(3, 1, 20, 256), MISTRAL, KIMI])
def test_any_shape_is_taken(sizes: Sizes) -> None:
    """Head sizes that are not a power of two, and more query heads per key head than the smallest tile has rows."""
    for chunks in ([Chunk(9, 2, 2, 9), decode(4)], [decode(9), decode(4)]):
        Step(chunks, sizes, 0, torch.float32, backend=interpreted).check(LayerOptions(0.1))


@pytest.mark.parametrize("num_heads", [6, 33, 64, 96])
def test_heads_over_latents_are_divided_into_groups_of_one_size(num_heads: int) -> None:
    """Those of a group are the rows of a program: all of 6, 11 of 33, 16 of 64 and of 96 with numbers in float32."""
    for chunks in ([Chunk(9, 2, 2, 9), decode(4)], [decode(9), decode(4)]):
        Step(chunks, Sizes(4, 1, num_heads, 40, 32), 0, torch.float32, backend=interpreted).check(LayerOptions(0.3))


@pytest.mark.parametrize("num_heads", [6, 18])
def test_long_contexts_over_latents_are_divided(num_heads: int) -> None:
    chunks = [Chunk(500, 492, 492, 500), decode(3), decode(400)]
    backend = functools.partial(interpreted, SOME)
    Step(chunks, Sizes(16, 1, num_heads, 40, 32), 2, torch.float32, backend=backend).check(LayerOptions(0.25))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_with_many_tokens_over_latents_has_tiles_of_several_tokens(dtype: torch.dtype) -> None:
    chunks = [Chunk(150, 20, 20, 150, (Span(10, 45), Span(70, 60))), decode(90)]
    Step(chunks, Sizes(16, 1, 3, 24, 16), 1, dtype, backend=interpreted).check(LayerOptions(0.2, Window(50), 3.0))


def test_large_scores_neither_overflow_nor_vanish() -> None:
    step = Step([decode(50)], Sizes(16, 1, 2, 64), 1, torch.float32, backend=functools.partial(interpreted, SOME))
    step.contents[0].query.mul_(1e3)
    step.check(LayerOptions(1.0))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("sizes", [Sizes(8, 2, 2, 16), Sizes(4, 1, 6, 40, 20)], ids=["values", "latents"])
@pytest.mark.parametrize("window", [None, Window(5)])
def test_a_token_that_is_no_number_reaches_the_tokens_that_see_it_and_no_others(
    wrong: float, part: str, sizes: Sizes, window: Window | None
) -> None:
    check_a_wrong_number(interpreted, sizes, torch.float32, part, wrong, window)


def result_of_the_first(chunks: list[Chunk], num_processors: int = SOME) -> torch.Tensor:
    """Returns the result of a step's first sequence, whose contents are the same in every step."""
    sizes = Sizes(16, 2, 2, 16)
    alone = Step(chunks[:1], sizes, 5, torch.float32, backend=functools.partial(interpreted, num_processors))
    step = Step(chunks, sizes, 6, torch.float32, backend=functools.partial(interpreted, num_processors))
    for name in ("query", "keys", "values"):
        getattr(step.contents[0], name).copy_(getattr(alone.contents[0], name))
    for pool, source in zip(step.pools[1], alone.pools[1], strict=True):
        for block, from_block in zip(step.tables[0], alone.tables[0], strict=True):
            pool[block] = source[from_block]
    return step.run(LayerOptions(1.0))[0]


@pytest.mark.parametrize("first", [decode(700), Chunk(600, 580, 580, 600)], ids=["single token", "chunk"])
def test_a_sequences_bits_do_not_depend_on_other_lengths(first: Chunk) -> None:
    """Holds for a fixed number of sequences, which decides how keys are divided."""
    chunk = Chunk(40, 30, 30, 40)
    results = [result_of_the_first([first, chunk, decode(length)]) for length in (3, 900)]
    assert torch.equal(*results)
    if first.stop - first.start == 1:
        assert torch.equal(result_of_the_first([first, decode(3)]), result_of_the_first([first, decode(900)]))


def test_parts_of_long_sequences_give_the_reference_results() -> None:
    """Tiles of chunks are divided as well, beside sequences that are not and one without new tokens."""
    chunks = [Chunk(700, 670, 670, 700), decode(3), decode(500), Chunk(20, 0, 0, 20)]
    step = Step(chunks, Sizes(16, 2, 2, 16), 2, torch.float32, backend=functools.partial(interpreted, SOME))
    step.check(LayerOptions(0.25))


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("num_tokens", [1, 100, 1000])
@pytest.mark.parametrize("shared_bytes", [99 << 10, 227 << 10])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_tiles_fit_into_shared_memory(
    element_bytes: int, head_dim: int, num_tokens: int, shared_bytes: int, is_rounded: bool
) -> None:
    key_bytes = element_bytes * head_dim
    tile = tile_of(key_bytes, 4, num_tokens, shared_bytes, is_rounded=is_rounded)
    assert tile.num_rows >= 16
    assert tile.num_keys >= 16
    assert tile.num_stages >= 2
    # Queries, and the keys and values that are loaded ahead.
    stored_bytes = head_dim if is_rounded else key_bytes
    ahead = 2 * (tile.num_stages - 1) * tile.num_keys * stored_bytes
    assert tile.num_rows * key_bytes + ahead <= shared_bytes


@pytest.mark.parametrize(("padded_dim", "num_heads"), [(256, 32), (512, 64), (512, 128), (16, 2)])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("num_tokens", [1, 1000])
@pytest.mark.parametrize("shared_bytes", [99 << 10, 163 << 10, 227 << 10])
def test_tiles_of_latents_fit_into_shared_memory(
    padded_dim: int, num_heads: int, element_bytes: int, num_tokens: int, shared_bytes: int
) -> None:
    tile = latent_tile_of(padded_dim, 64, element_bytes, num_heads, num_tokens, shared_bytes)
    key_bytes = (padded_dim + 64) * element_bytes
    # The compiler needs one tile less than stages, or as many where products are asynchronous.
    num_tiles = tile.num_stages - (tile.num_rows < 64)
    assert (tile.num_rows + num_tiles * tile.num_keys) * key_bytes <= shared_bytes
    assert tile.num_stages >= 2
    # Sums of a program take half of the registers of its threads at most.
    assert tile.num_rows * padded_dim <= tile.num_warps * 32 * 128


def test_an_h100_computes_all_heads_over_latents_at_once() -> None:
    """A program then loads each latent once for all heads, and the next tile while it multiplies."""
    assert latent_tile_of(512, 64, 2, 64, 1, 227 << 10) == Tile(64, 64, num_stages=2, num_warps=8)
    assert latent_tile_of(512, 64, 2, 64, 1, 99 << 10).num_rows == 16


def test_a_device_with_more_shared_memory_loads_further_ahead() -> None:
    assert tile_of(256, 4, 1, 227 << 10).num_stages > tile_of(256, 4, 1, 64 << 10).num_stages


# Bytes of shared memory that one program may use (CUDA C++ Programming Guide, technical specifications). The smallest
# of the first kind is capability 8.6, whose programs are those of 8.0.
SHARED_BYTES = {"80": 99 << 10, "90": 227 << 10}


@pytest.mark.parametrize("part", ["latents", "others"])
def test_the_kernels_compile_for_an_absent_gpu(part: str) -> None:
    """The interpreter accepts more than the compiler. Runs in a separate process, in which the interpreter is off.

    Compiling latents takes 20 s of CPU, and the others 60 s. Triton keeps what it compiled, under a hash of the source
    of the kernel and of all that it calls, of its options and of Triton itself, so it compiles again what was changed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.decoder_svc.runner.cuda.compiled_triton",
            part,
            *(f"{capability}={most}" for capability, most in SHARED_BYTES.items()),
        ],
        env=environment | {"TRITON_CACHE_DIR": str(COMPILED_FOLDER), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    taken = map(int, done.stdout.split())
    for (capability, most), found in zip(SHARED_BYTES.items(), taken, strict=True):
        assert 0 < found < most, capability
