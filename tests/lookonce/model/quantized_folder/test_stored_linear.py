"""Tensors of quantized layers: the weights that they stand for, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lookonce.errors import ModelFolderError
from lookonce.model.quantized_folder.storage import Storage
from lookonce.model.quantized_folder.stored_linear import StoredLinear
from lookonce.model.quantized_folder.stored_weight import StoredWeight
from lookonce.model.safetensors_header import StoredTensor
from tests.quantized_folders import FORMS

NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}


def stored(
    tensors: Mapping[str, Tensor],
    entry: Mapping[str, object],
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype = torch.float32,
) -> StoredWeight:
    """Returns the weight of a layer that the loader has filled with these tensors."""
    storage = Storage.of({"quantization_config": dict(entry)})
    assert storage is not None
    headers = {
        name: StoredTensor(NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes, 0)
        for name, tensor in tensors.items()
    }
    linear = torch.nn.Linear(num_inputs, num_outputs, dtype=dtype)
    layer = StoredLinear("model.layers.0.mlp.up_proj", linear, headers, storage)
    for name, tensor in tensors.items():
        setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
    return layer.stored_weight()


def random_weight(num_outputs: int, num_inputs: int, seed: int = 0) -> Tensor:
    return torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=12)
@given(outputs=st.integers(1, 12), inputs=st.integers(1, 12), seed=st.integers(0, 1 << 30))
@pytest.mark.parametrize("name", FORMS)
def test_weights_are_those_of_the_formats_formula(name: str, outputs: int, inputs: int, seed: int) -> None:
    weight = random_weight(8 * outputs, 32 * inputs, seed)
    tensors, expected = FORMS[name].store(weight, seed)
    found = stored(tensors, FORMS[name].entry, *weight.shape)
    assert torch.equal(found.whole(), expected)
    assert found.has_readable_groups() == (FORMS[name].keeps_codes or inputs == 1)
    if found.has_readable_groups():
        assert torch.equal(found.quantized().dequantized(), expected)


SCHEMES = {
    "pack-quantized": [
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
        {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False},
        {"num_bits": 4, "strategy": "channel", "symmetric": False},
        {"num_bits": 8, "strategy": "channel", "symmetric": True},
        {"num_bits": 8, "strategy": "group", "group_size": 64, "symmetric": False},
    ],
    "int-quantized": [
        {"num_bits": 8, "strategy": "channel", "symmetric": True},
        {"num_bits": 8, "strategy": "tensor", "symmetric": True},
        {"num_bits": 8, "strategy": "channel", "symmetric": False},
    ],
    "float-quantized": [
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    ],
}


@pytest.mark.parametrize(
    ("layout", "weights"), [(layout, weights) for layout, all_weights in SCHEMES.items() for weights in all_weights]
)
def test_weights_are_those_of_the_package_that_writes_the_format(layout: str, weights: dict[str, object]) -> None:
    weight = random_weight(256, 384).bfloat16()
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    parts: dict[str, Tensor] = {"weight": weight, **scales_of(weight, weights)}
    compressor = BaseCompressor.get_value_from_registry(layout)
    tensors = compressor.compress(parts, scheme)
    entry = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    found = stored(tensors, entry, 256, 384, torch.bfloat16)
    expected = compressor.decompress(tensors, scheme)["weight"]
    assert torch.equal(found.whole(), expected)
    assert torch.equal(found.quantized().dequantized(), expected)
    assert (expected - weight).norm() < 0.2 * weight.norm(), "else the weight was not stored"


def scales_of(weight: Tensor, weights: Mapping[str, object]) -> dict[str, Tensor]:
    """Returns scales, and zero points where the scheme has them, in the shapes of the package."""
    match weights["strategy"]:
        case "group":
            parts = weight.unflatten(1, (-1, int(str(weights["group_size"]))))
        case "channel":
            parts = weight[:, None]
        case "tensor":
            parts = weight.reshape(1, 1, -1)
        case _:
            parts = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2).flatten(2)
    if weights.get("type") == "float":
        return {"weight_scale": parts.abs().amax(dim=2) / 448}
    bits = int(str(weights["num_bits"]))
    if weights["symmetric"]:
        return {"weight_scale": parts.abs().amax(dim=2) * 2 / ((1 << bits) - 1)}
    low, high = parts.amin(dim=2), parts.amax(dim=2)
    scales = (high - low) / ((1 << bits) - 1)
    zeros = (-low / scales).round() - (1 << bits - 1)
    return {"weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("awq", {"qzeros": torch.zeros(3, 1, dtype=torch.int32)}, "qzeros is I32 of 3 × 1, not I32 of 3 × 2"),
        ("awq", {"qweight": torch.zeros(96, 4, dtype=torch.int32)}, "AWQ with 8 bits is not served"),
        (
            "awq",
            {"scales": torch.zeros(5, 16)},
            "96 inputs are not 5 groups of equal size, and a shorter last",
        ),
        ("awq", {"scales": torch.zeros(0, 16)}, "96 inputs are not 0 groups of equal size"),
        ("awq", {"scales": torch.zeros(16)}, "which are not two matrices"),
        ("gptq-4", {"g_idx": torch.zeros(95, dtype=torch.int32)}, "g_idx is I32 of 95, not I32 of 96"),
        ("gptq-4", {"qweight": torch.zeros(9, 16, dtype=torch.int32)}, "9 words for 96 codes are neither 4 nor 8 bits"),
        ("gptq-4", {"bias": torch.zeros(15)}, "bias has the shape 15, not 16"),
        ("gptq-4", {"perm": torch.zeros(96, dtype=torch.int32)}, "perm is not known for gptq"),
        ("compressed-int8", {"weight": torch.zeros(16, 96)}, "weight is F32 of 16 × 96, not I8 or F8_E4M3 of 16 × 96"),
        ("compressed-int8", {"weight_scale": torch.zeros(7, 1)}, "weight_scale has the shape 7 × 1"),
        ("fp8-block", {"weight_scale_inv": torch.zeros(1, 2)}, "weight_scale_inv has the shape 1 × 2"),
        ("compressed-float8", {"weight_zero_point": torch.zeros(16, 1, dtype=torch.int8)}, "float8 with zero points"),
        ("compressed-int4", {"weight_scale": torch.zeros(16, 3, dtype=torch.int64)}, "weight_scale is I64"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_the_layer(
    name: str, change: Mapping[str, Tensor], problem: str
) -> None:
    tensors, _ = FORMS[name].store(random_weight(16, 96), 0)
    with pytest.raises(ModelFolderError) as caught:
        stored({**tensors, **change}, FORMS[name].entry, 16, 96)
    assert problem in str(caught.value)
    assert "the quantized layer model.layers.0.mlp.up_proj cannot be loaded" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "part"), [("awq", "qzeros"), ("gptq-4", "scales"), ("compressed-int4", "weight_scale")]
)
def test_a_missing_tensor_is_named(name: str, part: str) -> None:
    tensors, _ = FORMS[name].store(random_weight(16, 96), 0)
    del tensors[part]
    with pytest.raises(ModelFolderError, match=f"{part} is missing"):
        stored(tensors, FORMS[name].entry, 16, 96)


def test_inputs_that_are_in_no_group_are_refused() -> None:
    tensors, _ = FORMS["gptq-4"].store(random_weight(16, 96), 0)
    tensors["g_idx"][7] = 3
    with pytest.raises(ModelFolderError, match="an input is in none of the 3 groups"):
        stored(tensors, FORMS["gptq-4"].entry, 16, 96).has_readable_groups()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_weight_that_is_not_a_number_is_refused(code: int) -> None:
    tensors, _ = FORMS["compressed-float8"].store(random_weight(16, 96), 0)
    tensors["weight"].view(torch.uint8)[3, 4] = code
    weight = stored(tensors, FORMS["compressed-float8"].entry, 16, 96)
    for read in (weight.quantized, weight.whole):
        with pytest.raises(ModelFolderError, match="a weight is not a number"):
            read()


def test_scales_of_activations_are_left_out() -> None:
    tensors, expected = FORMS["compressed-float8"].store(random_weight(16, 96), 0)
    weight = stored({**tensors, "input_scale": torch.ones(1)}, FORMS["compressed-float8"].entry, 16, 96)
    assert torch.equal(weight.whole(), expected)


@pytest.mark.parametrize("inputs", [90, 97])
def test_groups_that_the_kernels_cannot_read_are_whole(inputs: int) -> None:
    weight = random_weight(16, inputs)
    scales = torch.full((16, inputs if inputs == 97 else 9), 0.01, dtype=torch.float16)
    codes = torch.randint(-128, 128, weight.shape, dtype=torch.int8)
    entry = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    found = stored({"weight": codes, "weight_scale": scales}, entry, 16, inputs)
    assert not found.has_readable_groups()
    assert torch.equal(found.whole(), codes.float() * scales[0, 0].float())
