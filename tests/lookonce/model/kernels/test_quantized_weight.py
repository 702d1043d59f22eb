"""Weights as integers: how far they are from the weights, and what layers compute from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.model.kernels.linear_layers import replace_linears
from lookonce.model.kernels.native_level import processor_levels
from lookonce.model.kernels.native_linear import NativeLinear, native_linear, packed
from lookonce.model.kernels.quantized_weight import (
    GROUP_INPUTS,
    CodeForm,
    QuantizedLinear,
    QuantizedWeight,
    concatenated,
    inputs_of,
    padded,
    quantized,
    whole,
)
from tests.lookonce.model.kernels.any_codes import any_codes

pytestmark = pytest.mark.usefixtures("library")

DTYPES = [torch.float32, torch.bfloat16]
FORMS = list(CodeForm)


def random_weight(num_outputs: int, num_inputs: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(num_outputs, 1, generator=generator).exp()
    return (torch.randn(num_outputs, num_inputs, generator=generator) * sizes).to(dtype)


@settings(max_examples=60)
@given(
    num_outputs=st.integers(1, 40),
    num_inputs=st.integers(1, 300),
    bits=st.sampled_from([4, 8]),
    seed=st.integers(0, 1 << 30),
)
def test_a_weight_is_off_by_half_a_step_at_most(num_outputs: int, num_inputs: int, bits: int, seed: int) -> None:
    weight = random_weight(num_outputs, num_inputs, seed=seed)
    found = quantized(weight, bits)
    for start in range(0, num_inputs, GROUP_INPUTS):
        group, rounded = weight[:, start : start + GROUP_INPUTS], found.dequantized()[:, start : start + GROUP_INPUTS]
        low, high = group.amin(dim=1).clamp(max=0), group.amax(dim=1).clamp(min=0)
        step = group.abs().amax(dim=1) / 127 if bits == 8 else (high - low) / 15
        # Scales and offsets have eight binary digits.
        assert ((rounded - group).abs().amax(dim=1) <= 0.5 * step * 1.02 + 1e-7).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_stay_zeros_and_large_weights_stay_large(bits: int) -> None:
    weight = torch.zeros(3, 256)
    weight[1] = -2.0
    weight[2, 200] = 1e30
    found = quantized(weight, bits).dequantized()
    assert torch.equal(found[0], weight[0])
    assert torch.equal(found[2, :128], weight[2, :128])
    torch.testing.assert_close(found, weight, rtol=1e-2, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", [16, 32, 36, 128, 130, 192, 384])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_a_float32_layer_has_the_bits_of_one_with_whole_weights(form: CodeForm, group: int, rows: int) -> None:
    weight = any_codes(70, 302, form, group, torch.float32)
    bias, inputs = torch.randn(70), torch.randn(rows, 302)
    layers = [NativeLinear(packed(one, bias), num_threads=2) for one in (weight, weight.dequantized())]
    assert torch.equal(layers[0](inputs), layers[1](inputs))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", [16, 32, 36, 128, 130, 192, 384])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_a_bfloat16_layer_is_closer_than_rounding_its_inputs_was(form: CodeForm, group: int, rows: int) -> None:
    weight = any_codes(70, 302, form, group, torch.bfloat16)
    inputs = torch.randn(rows, 302, generator=torch.Generator().manual_seed(2))
    inputs[:, 17] *= 60
    exact = torch.nn.functional.linear(inputs.bfloat16().double(), replace(weight, dtype=torch.float64).dequantized())
    layer = NativeLinear(packed(weight), num_threads=2, output_dtype=torch.float32)
    found = layer(inputs.bfloat16())
    rounding = torch.nn.functional.linear(inputs.double(), weight.dequantized().double()) - exact
    assert (found.double() - exact).norm() < 0.1 * rounding.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_code_of_floating_point_is_pytorchs_number(dtype: torch.dtype) -> None:
    codes = torch.arange(256)[torch.arange(256) & 0x7F != 0x7F]
    # Each code is a weight of its own output, multiplied with 1.
    weight = torch.zeros(len(codes), 32, dtype=torch.int8)
    weight[:, 5] = codes.to(torch.int8)
    ones, zeros = torch.ones(len(codes), 1), torch.zeros(len(codes), 1)
    layer = NativeLinear(packed(QuantizedWeight(weight, ones, zeros, CodeForm.FLOAT8, 32, dtype)), num_threads=2)
    rows = torch.zeros(1, 32, dtype=dtype)
    rows[0, 5] = 1
    wanted = codes.to(torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    assert torch.equal(layer(rows)[0], wanted)
    assert len(wanted.unique()) == 253, "254 numbers, two of them 0"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_bit_equal_alone_and_in_a_batch(form: CodeForm, dtype: torch.dtype) -> None:
    layer = NativeLinear(packed(any_codes(96, 576, form, 128, dtype)), num_threads=2)
    rows = torch.randn(300, 576).to(dtype)
    together = layer(rows)
    for index in (0, 95, 96, 299):
        assert torch.equal(layer(rows[index : index + 1]), together[index : index + 1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_stays_in_its_row_and_is_not_hidden(
    form: CodeForm, number: float, dtype: torch.dtype
) -> None:
    layer = NativeLinear(packed(any_codes(40, 256, form, 128, dtype)), num_threads=2)
    rows = torch.randn(3, 256).to(dtype)
    without = layer(rows)
    rows[1, 130] = number
    found = layer(rows)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], without[[0, 2]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_zeros_gives_the_bias_and_tiny_inputs_count(dtype: torch.dtype) -> None:
    weight, bias = quantized(random_weight(40, 256, dtype), 8), torch.arange(40.0)
    layer = NativeLinear(packed(weight, bias), num_threads=2, output_dtype=torch.float32)
    rows = torch.zeros(2, 256, dtype=dtype)
    rows[1] = 1e-30
    assert torch.equal(layer(rows)[0], bias)
    without_bias = NativeLinear(packed(weight), num_threads=2, output_dtype=torch.float32)(rows)[1]
    wanted = replace(weight, dtype=torch.float64).dequantized() @ rows[1].double()
    torch.testing.assert_close(without_bias.double(), wanted, rtol=1e-3, atol=1e-33)


def test_rows_are_joined_selected_and_padded_as_those_of_whole_weights() -> None:
    weights = [quantized(random_weight(rows, 200), 4) for rows in (16, 32)]
    joined = concatenated(weights)
    assert isinstance(joined, QuantizedWeight)
    expected = torch.cat([weight.dequantized() for weight in weights])
    assert torch.equal(joined.dequantized(), expected)
    order = torch.randperm(48)
    assert torch.equal(joined[order].dequantized(), expected[order])
    wide = padded(joined, num_rows=5, num_inputs=100)
    assert isinstance(wide, QuantizedWeight)
    assert wide.shape == (53, 300)
    found = wide.dequantized()
    assert torch.equal(found[:48, :200], expected)
    assert not found[48:].any()


@settings(max_examples=80)
@given(
    form=st.sampled_from(FORMS),
    group=st.sampled_from([16, 32, 48, 64, 128, 1000]),
    num_inputs=st.integers(8, 150),
    start=st.integers(0, 140),
    num_taken=st.integers(1, 150),
)
def test_a_share_of_the_inputs_has_the_same_weights(
    form: CodeForm, group: int, num_inputs: int, start: int, num_taken: int
) -> None:
    weight = any_codes(40, 2 * num_inputs, form, group, torch.float32)
    share = slice(min(start, 2 * num_inputs - 1), min(start + num_taken, 2 * num_inputs))
    found = inputs_of(weight, share)
    assert torch.equal(whole(found), weight.dequantized()[:, share])
    if isinstance(found, QuantizedWeight):
        assert packed(found).codes is not None, "kernels read its groups"
    else:
        assert share.start % 16 or (share.stop - share.start) % 2, "it could be read as codes"


def test_a_share_whose_groups_have_no_blocks_is_whole() -> None:
    """8576 = 128 · 67, so groups of 134 inputs would begin with the share, which kernels refuse."""
    weight = any_codes(8, 2 * 8576, CodeForm.INT8, 8576, torch.float32)
    share = slice(134, 8710)
    found = inputs_of(weight, share)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, weight.dequantized()[:, share])


def test_rows_of_different_layouts_are_joined_whole() -> None:
    weight = random_weight(16, 200)
    for other in (weight, quantized(weight, 8), any_codes(16, 200, CodeForm.INT4, 32, torch.float32)):
        joined = concatenated([quantized(weight, 4), other])
        assert isinstance(joined, torch.Tensor)
        assert torch.equal(joined, torch.cat([quantized(weight, 4).dequantized(), whole(other)]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantized_layers_get_our_kernel(dtype: torch.dtype) -> None:
    plain = QuantizedLinear(quantized(random_weight(40, 96, dtype), 8), torch.randn(40).to(dtype))
    model = torch.nn.Sequential(plain)
    assert replace_linears(model, lambda linear, activation: native_linear(linear, activation, num_threads=2)) == 1
    assert isinstance(model[0], NativeLinear)
    rows = torch.randn(3, 96).to(dtype)
    wanted = plain(rows).float()
    assert (model(rows).float() - wanted).norm() < 1e-2 * wanted.norm()
    # A byte for each weight, and two for each scale; offsets are 0 and take none.
    assert model[0].nbytes == 64 * 96 + 2 * 64


def test_four_bits_take_an_eighth_of_float32() -> None:
    weight = random_weight(64, 1024)
    whole, small = packed(weight), packed(quantized(weight, 4))
    assert small.nbytes == whole.nbytes // 8 + 2 * 64 * 8 * 2


@pytest.mark.parametrize("num_rows", [1, 5, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_scales_of_two_bytes_change_no_bit(form: CodeForm, dtype: torch.dtype, num_rows: int) -> None:
    narrow = any_codes(64, 256, form, 128, dtype)
    # A scale that bfloat16 does not hold makes all of them float32.
    other = replace(any_codes(32, 256, form, 128, dtype), scales=torch.full((32, 2), 0.1))
    wide = concatenated([narrow, other])
    layers = [NativeLinear(packed(weight), num_threads=2) for weight in (narrow, wide)]
    assert layers[1].nbytes > layers[0].nbytes + packed(other).nbytes
    rows = torch.randn(num_rows, 256, generator=torch.Generator().manual_seed(5)).to(dtype)
    found, wanted = (layer(rows) for layer in layers)
    assert torch.equal(found, wanted[:, :64])
    expected = rows.double() @ wide.dequantized().double().T
    assert (wanted.double() - expected).abs().max() <= 1e-2 * expected.abs().max()


@pytest.mark.parametrize("num_inputs", [16, 302])
def test_several_groups_of_few_inputs_are_refused(num_inputs: int) -> None:
    with pytest.raises(ValueError, match="groups of 14 inputs have no parts of 16 to 128"):
        packed(any_codes(32, num_inputs, CodeForm.INT8, 14, torch.bfloat16))


@pytest.mark.parametrize("form", [CodeForm.INT4, CodeForm.INT8])
@pytest.mark.parametrize("num_inputs", [14, 302, 576])
def test_integers_have_the_same_bits_with_all_vectors_and_tiles_of_the_processor(
    form: CodeForm, num_inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = [level.name for level in processor_levels() if level.name.startswith(("avx512", "amx"))]
    if len(levels) < 2:
        pytest.skip("this processor has one kind of wide vectors at most")
    rows = torch.randn(67, num_inputs, generator=torch.Generator().manual_seed(2)).bfloat16()
    rows[5] *= 1e30
    found = []
    for level in levels:
        monkeypatch.setenv("LOOKONCE_NATIVE_LEVEL", level)
        layer = NativeLinear(packed(any_codes(96, num_inputs, form, 32, torch.bfloat16)), num_threads=2)
        found.append(layer(rows))
    for other in found[1:]:
        assert torch.equal(other, found[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_rows_have_no_outputs(form: CodeForm, dtype: torch.dtype) -> None:
    layer = NativeLinear(packed(any_codes(70, 302, form, 128, dtype)), num_threads=2)
    assert layer(torch.empty(0, 302, dtype=dtype)).shape == (0, 70)
