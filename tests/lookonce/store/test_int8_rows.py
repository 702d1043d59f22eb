"""Int8 rows have an error of at most half a scale, report it, and can be restored row by row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store import int8_rows
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.int8_rows import dequantise, quantise
from tests.lookonce.store.entries import fresh_key, write

# Rounding in float32 adds this much to the error of half a scale.
HALF_SCALE = 0.5 + 2e-5
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@st.composite
def matrices(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Draws rows whose levels have widely different magnitudes, some zero, and their number of extra levels."""
    num_rows, num_levels, hidden_size = draw(st.integers(1, 20)), draw(st.integers(0, 3)), draw(st.integers(1, 33))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    elements = torch.randn((num_rows, 1 + num_levels, hidden_size), generator=generator)
    exponents = draw(st.lists(st.integers(-30, 30), min_size=1, max_size=5))
    chosen = torch.randint(len(exponents), (num_rows, 1 + num_levels, 1), generator=generator)
    elements *= 10.0 ** torch.tensor(exponents, dtype=torch.float32)[chosen]
    elements[torch.rand((num_rows, 1 + num_levels), generator=generator) < 0.1] = 0.0
    return elements.flatten(1), num_levels


def restored(rows: torch.Tensor, num_levels: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return dequantise(quantise(rows, num_levels).data, num_levels, dtype)


def meta_of(rows: torch.Tensor, num_levels: int) -> EmbeddingMeta:
    return EmbeddingMeta(len(rows), rows.shape[1] // (1 + num_levels), num_levels, RowDtype.INT8_SCALED, 10, 10)


@given(matrix=matrices())
def test_every_element_is_off_by_half_a_scale_at_most(matrix: tuple[torch.Tensor, int]) -> None:
    rows, num_levels = matrix
    quantised = quantise(rows, num_levels)
    assert quantised.data.is_contiguous()
    assert quantised.data.nbytes == meta_of(rows, num_levels).size_bytes
    exact = rows.double().unflatten(1, (1 + num_levels, -1))
    difference = (restored(rows, num_levels).double() - rows.double()).unflatten(1, (1 + num_levels, -1))
    scale = exact.abs().amax(dim=2, keepdim=True) / 127
    assert bool((difference.abs() <= HALF_SCALE * scale).all())
    norm = float(exact.norm())
    expected = float(difference.norm()) / norm if norm else 0.0
    assert quantised.relative_error == pytest.approx(expected, rel=1e-3, abs=1e-7)


@given(
    scale=st.integers(1, (1 << 16) - 1).flatmap(lambda whole: st.integers(-60, 60).map(lambda e: whole * 2.0**e)),
    values=st.lists(st.integers(-127, 127), min_size=1, max_size=40),
    sign=st.sampled_from([-1, 1]),
)
def test_multiples_of_the_scale_come_back_exactly(scale: float, values: list[int], sign: int) -> None:
    rows = torch.tensor([[sign * 127, *values]], dtype=torch.float32) * scale
    assert torch.equal(restored(rows, 0), rows)
    assert quantise(rows, 0).relative_error == 0


@given(matrix=matrices())
def test_restored_rows_quantise_to_themselves(matrix: tuple[torch.Tensor, int]) -> None:
    rows, num_levels = matrix
    once = restored(rows, num_levels)
    torch.testing.assert_close(restored(once, num_levels), once, rtol=1e-6, atol=0)


def test_zeros_and_values_too_small_for_a_scale_become_zeros() -> None:
    rows = torch.tensor([[0.0, -0.0, 0.0], [1e-40, -1e-37, 0.0], [1.0, -2.0, 0.0]])
    quantised = quantise(rows, 0)
    assert not quantised.data[:2].any()
    assert torch.equal(dequantise(quantised.data, 0, torch.float32)[:2], torch.zeros(2, 3))
    assert quantise(rows[:1], 0).relative_error == 0


def test_the_layout_is_scales_then_values() -> None:
    rows = torch.tensor([[127.0, -3.0, 2.54, 1.27], [0.0, 0.0, -63.5, 63.5]])
    layout = np.dtype([("scales", "<f4", (2,)), ("values", "i1", (2, 2))])
    stored = np.frombuffer(quantise(rows, 1).data.numpy().tobytes(), layout)
    assert stored["scales"].tolist() == [[1.0, np.float32(2.54) / np.float32(127)], [0.0, 0.5]]
    assert stored["values"].tolist() == [[[127, -3], [127, 64]], [[0, 0], [-127, 127]]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_levels", [0, 2])
def test_rows_are_the_same_in_parts_of_any_size(
    dtype: torch.dtype, num_levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randn(50, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = quantise(rows, num_levels)
    elements = dequantise(whole.data, num_levels, torch.float32)
    for part_elements in (1, 7 * 96, 50 * 96):
        monkeypatch.setattr(int8_rows, "_PART_ELEMENTS", part_elements)
        again = quantise(rows, num_levels)
        assert torch.equal(again.data, whole.data)
        assert again.relative_error == pytest.approx(whole.relative_error, rel=1e-6)
        assert torch.equal(dequantise(whole.data, num_levels, dtype), elements.to(dtype)), "rounded once, from float32"


def test_normally_distributed_rows_lose_less_than_a_hundredth() -> None:
    rows = torch.randn(300, 3584, generator=torch.Generator().manual_seed(2)).bfloat16()
    quantised = quantise(rows, 0)
    assert 0.005 < quantised.relative_error < 0.01
    assert quantised.data.nbytes / rows.nbytes < 0.501


@pytest.mark.parametrize("num_levels", [0, 3])
def test_ranges_from_the_store_are_the_same_ranges_of_the_rows(
    num_levels: int, shared_redis: EmbeddedRedis, make_store: Callable[..., EmbeddingStore]
) -> None:
    rows = torch.randn(700, (1 + num_levels) * 1001, generator=torch.Generator().manual_seed(3))
    data, meta, key = quantise(rows, num_levels).data, meta_of(rows, num_levels), fresh_key()
    expected = dequantise(data, num_levels, torch.bfloat16)
    store = make_store(shared_redis.url)
    assert write(store, key, meta, memoryview(data.numpy()))
    assert store.stat(key) == store.metadata(key) == meta
    for start, stop in ((0, 700), (0, 1), (1, 700), (333, 334), (120, 580)):
        buffer = bytearray((stop - start) * meta.row_bytes)
        assert store.read_rows(key, start, stop, memoryview(buffer)) is None
        part = torch.frombuffer(buffer, dtype=torch.uint8).view(stop - start, -1)
        assert torch.equal(dequantise(part, num_levels, torch.bfloat16), expected[start:stop])
