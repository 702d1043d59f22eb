"""Copies of rows have memory of their own, and values that are not finite are found, on CPUs and on a fake device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from encoder_svc.vision.cuda_rows import rows_from_cuda
from encoder_svc.vision.row_transfer import is_all_finite, rows_on_host
from tests.decoder_svc.runner.cuda import interpreted_triton
from tests.decoder_svc.runner.cuda.fake_cuda import FakeCuda, installed
from tests.decoder_svc.runner.cuda.simulated_device import CUDA, RESULT, RETURN

from encoder_svc.vision import varlen_kernel  # isort: skip  # interpreted_triton finds Triton

assert interpreted_triton.TRITON_FOLDER
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with installed(varlen_kernel) as cuda:
        yield cuda


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, -torch.nan])
@pytest.mark.parametrize("place", [0, 17, 34])
def test_one_value_that_is_not_finite_is_found(dtype: torch.dtype, value: float, place: int) -> None:
    for others in (torch.randn(5, 7), torch.full((5, 7), -1.0), torch.zeros(5, 7)):
        rows = others.to(dtype)
        rows.view(-1)[place] = value
        assert not is_all_finite(rows)
        with pytest.raises(ValueError, match="not finite"):
            rows_on_host([torch.zeros(1, 7, dtype=dtype), rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_nans_are_found_and_all_finite_values_pass(dtype: torch.dtype) -> None:
    kind = torch.int16 if dtype.itemsize == 2 else torch.int32
    steps = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) * (1 if kind is torch.int16 else 1 << 16)
    values = steps.to(kind).view(dtype)
    assert is_all_finite(values[values.isfinite()])
    for value in values[~values.isfinite()][::7]:
        assert not is_all_finite(value[None])
    largest = torch.finfo(dtype)
    assert is_all_finite(torch.tensor([largest.max, largest.min, -0.0, largest.smallest_normal / 2], dtype=dtype))


def rows_of_two_images() -> list[torch.Tensor]:
    """Returns parts of one tensor, as a pass gives them."""
    whole = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    return [part[:size] for part, size in zip(whole.split([5, 7]), (4, 7), strict=True)]


def test_each_copy_has_memory_of_its_own() -> None:
    rows = rows_of_two_images()
    for copy, wanted in zip(rows_on_host(rows), rows, strict=True):
        assert torch.equal(copy, wanted)
        assert copy.is_contiguous()
        assert copy.untyped_storage().nbytes() == copy.nbytes


def test_rows_on_a_device_are_tested_there_and_waited_for_once(cuda: FakeCuda) -> None:
    wanted = rows_of_two_images()
    rows = [each.to(CUDA) for each in wanted]
    with cuda.device.noting() as events:
        copies = rows_from_cuda(rows)
    assert [event.kind for event in events] == [RETURN, RETURN, RESULT]
    for copy, each in zip(copies, wanted, strict=True):
        assert torch.equal(copy, each)
        assert copy.untyped_storage().nbytes() == copy.nbytes


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_values_on_a_device_that_are_not_finite_are_found(value: float, cuda: FakeCuda) -> None:
    rows = rows_of_two_images()
    rows[1][-1, -1] = value
    with pytest.raises(ValueError, match="not finite"):
        rows_from_cuda([each.to(CUDA) for each in rows])
