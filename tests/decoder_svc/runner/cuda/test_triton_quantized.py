"""Products with codes, run by Triton's interpreter, against those with the weights that codes stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from decoder_svc.runner.cuda.device_weight import DeviceWeight, joined, tile_inputs
from lookonce.model.kernels.quantized_weight import CodeForm, concatenated, padded, quantized
from tests.decoder_svc.runner.cuda.interpreted_triton import MANY, triton_quantized
from tests.lookonce.model.kernels.any_codes import any_codes

DEVICE = torch.device("cpu")
# One unit in the last place of float16, relative to the largest result; sums in another order.
TOLERANCES = {torch.float32: 3e-6, torch.float16: 1e-3}
# Inputs of a group: fewer than a tile, those of a tile, two tiles, tiles of 16 inputs, and all.
GROUPS = [16, 32, 64, 128, 48, 1000]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("form", list(CodeForm))
@pytest.mark.parametrize("num_inputs", [256, 330])
def test_an_expanded_weight_has_the_numbers_of_its_codes(form: CodeForm, group: int, num_inputs: int) -> None:
    weight = any_codes(70, num_inputs, form, group, torch.float32)
    found = triton_quantized.expanded(DeviceWeight.of(weight, DEVICE))
    # A device may round once where PyTorch rounds twice.
    torch.testing.assert_close(found, weight.dequantized(), rtol=1e-6, atol=1e-6)


# One processor, among which inputs are not divided, and many.
@pytest.mark.parametrize("num_processors", [1, MANY])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("form", list(CodeForm))
@pytest.mark.parametrize(("group", "has_bias"), [(32, True), (48, False), (128, True), (1000, False)])
def test_products_are_those_of_the_whole_weight(
    form: CodeForm, group: int, has_bias: bool, dtype: torch.dtype, num_processors: int
) -> None:
    weight = any_codes(70, 330, form, group, dtype)
    on_device = DeviceWeight.of(weight, DEVICE)
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(70, generator=generator).to(dtype) if has_bias else None
    for num_rows in (1, 3, 16, 17, 128, 129):
        rows = torch.randn(num_rows, 330, generator=generator).to(dtype)
        wanted = F.linear(rows.float(), weight.dequantized().float(), None if bias is None else bias.float())
        found = triton_quantized.linear(rows, on_device, bias, num_processors)
        assert found.dtype == dtype
        assert (found.float() - wanted).abs().max() <= TOLERANCES[dtype] * wanted.abs().max()


@pytest.mark.parametrize("form", list(CodeForm))
def test_a_device_weight_has_the_numbers_of_its_codes(form: CodeForm) -> None:
    for group, num_inputs in ((32, 330), (48, 256), (1000, 330)):
        weight = any_codes(70, num_inputs, form, group, torch.float32)
        assert torch.equal(DeviceWeight.of(weight, DEVICE).dequantized(), weight.dequantized())


def test_offsets_that_float16_does_not_hold_change_nothing_where_no_input_is() -> None:
    """Weights are 0 here: the sum of an offset and of a code that are both too large."""
    weight = quantized(torch.zeros(8, 66, dtype=torch.float16), 4)
    codes = torch.full((8, 66), 8, dtype=torch.int8)
    weight = replace(weight, codes=codes, scales=torch.full((8, 1), 8200.0), offsets=torch.full((8, 1), -65_600.0))
    found = triton_quantized.linear(torch.ones(2, 66, dtype=torch.float16), DeviceWeight.of(weight, DEVICE), None, 1)
    assert torch.equal(found, torch.zeros(2, 8, dtype=torch.float16))


def test_every_code_of_float8_is_its_number() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(1, 2)
    weight = any_codes(1, codes.shape[1], CodeForm.FLOAT8, 1000, torch.float32)
    weight = replace(weight, codes=codes, scales=torch.ones(1, 1))
    found = triton_quantized.expanded(DeviceWeight.of(weight, DEVICE))
    assert torch.equal(found, codes.view(torch.float8_e4m3fn).float())


def test_no_rows_and_more_dimensions() -> None:
    weight = quantized(torch.randn(20, 64, generator=torch.Generator().manual_seed(0)), 4)
    on_device = DeviceWeight.of(weight, DEVICE)
    assert triton_quantized.linear(torch.zeros(0, 64), on_device, None, 1).shape == (0, 20)
    rows = torch.randn(2, 3, 64).transpose(0, 1)
    found = triton_quantized.linear(rows, on_device, None, 1)
    torch.testing.assert_close(found, F.linear(rows, weight.dequantized()), rtol=1e-5, atol=1e-5)


def test_an_input_that_is_not_finite_stays_in_its_row() -> None:
    weight = any_codes(70, 330, CodeForm.INT4, 32, torch.float32)
    on_device = DeviceWeight.of(weight, DEVICE)
    rows = torch.randn(3, 330, generator=torch.Generator().manual_seed(1))
    clean = triton_quantized.linear(rows, on_device, None, 1)
    rows[1, 329] = torch.nan
    found = triton_quantized.linear(rows, on_device, None, 1)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("form", list(CodeForm))
def test_joined_weights_are_one_above_the_other(form: CodeForm) -> None:
    first = any_codes(20, 64, form, 32, torch.float32)
    # Scales that bfloat16 does not hold, and no offsets.
    scales = torch.rand(10, 2, generator=torch.Generator().manual_seed(3))
    second = replace(any_codes(10, 64, form, 32, torch.float32), scales=scales, offsets=torch.zeros(10, 2))
    parts = [DeviceWeight.of(weight, DEVICE) for weight in (first, second)]
    assert [part.scales.dtype for part in parts] == [torch.bfloat16, torch.float32]
    both = joined(parts)
    wanted = concatenated([first, second]).dequantized()
    torch.testing.assert_close(triton_quantized.expanded(both), wanted, rtol=1e-6, atol=1e-6)
    part = both.outputs(20, 30)
    assert part.codes.data_ptr() == both.codes[20:].data_ptr(), "memory is shared"
    rows = torch.randn(2, 64, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(
        triton_quantized.linear(rows, part, None, 1), F.linear(rows, second.dequantized()), rtol=1e-5, atol=1e-5
    )


def test_bytes_of_a_weight() -> None:
    weight = quantized(torch.randn(256, 512, generator=torch.Generator().manual_seed(0)), 4)
    on_device = DeviceWeight.of(weight, DEVICE)
    # Half a byte for each weight, and two bytes each for scale and offset of 128 weights.
    assert on_device.nbytes == 256 * 512 // 2 + 256 * 4 * (2 + 2)
    assert DeviceWeight.of(quantized(torch.randn(256, 512), 8), DEVICE).nbytes == 256 * 512 + 256 * 4 * 2


@pytest.mark.parametrize(
    ("group", "tile"), [(128, 64), (64, 64), (192, 64), (96, 32), (48, 16), (24, None), (1000, 64), (330, 64)]
)
def test_groups_that_are_readable(group: int, tile: int | None) -> None:
    weight = any_codes(8, 330, CodeForm.INT8, group, torch.float32)
    assert tile_inputs(weight) == tile


def test_more_inputs_than_the_weight_has_groups_for() -> None:
    weight = padded(any_codes(8, 100, CodeForm.INT4, 64, torch.float32), num_inputs=40)
    found = triton_quantized.expanded(DeviceWeight.of(weight, DEVICE))
    torch.testing.assert_close(found, weight.dequantized(), rtol=1e-6, atol=1e-6)
