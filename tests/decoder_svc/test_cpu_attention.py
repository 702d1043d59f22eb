"""The CPU's own kernel against loops in float64, in mixed steps too; and what happens where it cannot be had."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder_svc.runner.attention import LayerOptions, SdpaBackend
from decoder_svc.runner.cpu_attention import NativeBackend, cpu_attention
from decoder_svc.runner.native_library import NativeLibraryError, load_library
from tests.decoder_svc.attention_reference import Chunk
from tests.decoder_svc.attention_step import LAYER, OPTIONS, SEEDS, SIZES, Sizes, Step, chunk_of_a_prompt


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    try:
        load_library()
    except NativeLibraryError as error:
        pytest.skip(f"there is no native library here: {error}")


def native() -> NativeBackend:
    return NativeBackend(load_library())


@st.composite
def decoding(draw: st.DrawFn) -> Chunk:
    """One new token behind any number of others."""
    stop = draw(st.integers(1, 40))
    return Chunk(stop, stop - 1, draw(st.integers(stop - 1, stop)), stop)


DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=200, deadline=None)
@given(
    chunks=st.lists(decoding() | chunk_of_a_prompt(), min_size=1, max_size=5),
    sizes=SIZES,
    options=OPTIONS,
    is_mutual_beyond_window=st.booleans(),
    has_sliding_group=st.booleans(),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_any_step_gives_what_the_reference_gives(
    chunks: list[Chunk],
    sizes: Sizes,
    options: LayerOptions,
    is_mutual_beyond_window: bool,
    has_sliding_group: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    window = options.window if has_sliding_group else None
    step = Step(chunks, sizes, seed, dtype, window=window, backend=native)
    step.check(options, is_mutual_beyond_window=is_mutual_beyond_window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("num_kv_heads", "num_groups", "head_dim"), [(3, 3, 64), (1, 8, 256), (8, 1, 80), (2, 7, 33)])
def test_long_contexts_are_put_together_from_pieces(
    dtype: torch.dtype, window: int | None, num_kv_heads: int, num_groups: int, head_dim: int
) -> None:
    """Around multiples of a piece's 256 tokens, in blocks that no piece ends with, beside a longer chunk."""
    sizes = Sizes(48, num_kv_heads, num_groups, head_dim)
    stops = (1, 255, 256, 257, 511, 800)
    chunks = [Chunk(stop, stop - 1, stop - 1, stop) for stop in stops] + [Chunk(300, 290, 290, 300)]
    options = LayerOptions(head_dim**-0.5, window)
    outputs = Step(chunks, sizes, 5, dtype, backend=native).run(options)
    wanted = Step(chunks, sizes, 5, dtype).run(options)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for output, want in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(output.float(), want.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_result_does_not_depend_on_the_others_in_the_step(dtype: torch.dtype) -> None:
    """Nor on the number of threads: deterministic mode wants the same bits in any company."""
    chunks = [Chunk(stop, stop - 1, stop - 1, stop) for stop in (700, 1, 300, 29)]
    sizes = Sizes(16, 2, 3, 64)
    together = Step(chunks, sizes, 5, dtype, backend=native)
    alone = Step(chunks[:1], sizes, 5, dtype, backend=native)
    # The same first sequence.
    together.contents[0] = alone.contents[0]
    for pool, of_alone in zip(together.pools[LAYER], alone.pools[LAYER], strict=True):
        for block, from_block in zip(together.tables[0], alone.tables[0], strict=True):
            pool[block] = of_alone[from_block]
    options = LayerOptions(0.125)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        in_company = together.run(options)[0]
        torch.set_num_threads(1)
        assert torch.equal(in_company, alone.run(options)[0])
    finally:
        torch.set_num_threads(num_threads)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    chunk = Chunk(50, 49, 49, 50)
    step, plain = (Step([chunk], Sizes(16, 1, 2, 64), 1, torch.float32, backend=kind) for kind in (native, SdpaBackend))
    for one in (step, plain):
        one.contents[0].query.mul_(1e4)
    torch.testing.assert_close(step.run(LayerOptions(1.0))[0], plain.run(LayerOptions(1.0))[0])


@pytest.mark.parametrize("sizes", [Sizes(4, 1, 65, 4), Sizes(4, 1, 1, 520), Sizes(4, 3, 11, 256), Sizes(1, 1, 1, 1)])
def test_any_shape_is_taken(sizes: Sizes) -> None:
    Step([Chunk(9, 8, 8, 9)], sizes, 0, torch.float32, backend=native).check(LayerOptions(0.1))


def test_other_dtypes_go_to_pytorch() -> None:
    for dtype in (torch.float64, torch.float16):
        step, plain = (Step([Chunk(9, 8, 8, 9)], Sizes(), 0, dtype, backend=kind) for kind in (native, SdpaBackend))
        assert torch.equal(step.run(LayerOptions(1.0))[0], plain.run(LayerOptions(1.0))[0])


def test_each_step_is_planned_anew() -> None:
    """The plan is kept for the layers of one step only, also where the next one looks alike."""
    backend = native()
    step = Step([Chunk(9, 8, 8, 9), Chunk(5, 4, 4, 5)], Sizes(), 0, torch.float32, backend=lambda: backend)
    step.check(LayerOptions(1.0))
    first = backend._plan
    step.check(LayerOptions(1.0))
    assert backend._plan is not first
    metadata = step.metadata(is_mutual_beyond_window=False)
    assert backend._planned(metadata) is backend._planned(metadata)
    assert backend._planned(dataclasses.replace(metadata)) is not backend._planned(metadata)


def test_nothing_outside_of_the_pools_is_read() -> None:
    """The kernel looks at no bounds, so this is looked at before."""
    step = Step([Chunk(9, 8, 8, 9)], Sizes(), 0, torch.float32, backend=native)
    metadata = step.metadata(is_mutual_beyond_window=False)
    group = metadata.full
    (table,) = group.block_tables
    query = torch.zeros(1, 4, 4)
    wrong = [
        dataclasses.replace(metadata, full=dataclasses.replace(group, block_tables=(table + 1000,))),
        dataclasses.replace(metadata, full=dataclasses.replace(group, block_tables=(table - 1000,))),
        dataclasses.replace(metadata, full=dataclasses.replace(group, block_tables=(table[:-1],))),
        dataclasses.replace(metadata, full=dataclasses.replace(group, first_keys=(9,))),
    ]
    for one in wrong:
        with pytest.raises(IndexError):
            step.backend.attend(LAYER, query, one.full, one, LayerOptions(1.0))


def test_without_a_compiler_pytorch_does_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    load_library.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    try:
        assert type(cpu_attention()) is SdpaBackend
        assert "there is no C++ compiler" in caplog.text
    finally:
        load_library.cache_clear()


def test_a_compiler_that_fails_is_told_by_its_first_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    compiler = tmp_path / "broken-c++"
    compiler.write_text("#!/bin/sh\necho 'no such language' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_library.cache_clear()
    try:
        with pytest.raises(NativeLibraryError, match="no such language"):
            load_library()
        assert not list((tmp_path / "cache/lookonce").iterdir()), "nothing half-made is left"
    finally:
        load_library.cache_clear()


def test_a_library_that_somebody_else_could_have_put_there_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "lookonce").mkdir()
    (tmp_path / "lookonce").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library.cache_clear()
    try:
        with pytest.raises(NativeLibraryError, match="nobody else may write"):
            load_library()
    finally:
        load_library.cache_clear()


def test_without_a_place_to_write_pytorch_does_it(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    load_library.cache_clear()
    try:
        assert type(cpu_attention()) is SdpaBackend
    finally:
        load_library.cache_clear()


def test_processes_that_start_together_all_get_it(tmp_path: pathlib.Path) -> None:
    script = "from decoder_svc.runner.cpu_attention import cpu_attention; print(cpu_attention().name)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == ["native"] * 3
    assert len(list((tmp_path / "lookonce").iterdir())) == 1
