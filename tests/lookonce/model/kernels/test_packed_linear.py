"""Packed layers give the results of plain ones, and plain layers stay where packing is not possible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from lookonce.model.kernels import packed_linear
from lookonce.model.kernels.activation import Activation
from lookonce.model.kernels.linear_layers import agrees_with_plain, replace_linears
from lookonce.model.kernels.packed_linear import PackedLinear, packed, unpackable_reason
from lookonce.model.weight_bytes import weight_bytes

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 3e-3}
SHAPES = [(1, 48), (5, 48), (2, 3, 48), (48,), (0, 48), (2, 0, 48)]
# oneDNN has no such activations.
NEVER_FUSED = (Activation.GELU_QUICK, Activation.RELU_SQUARED)
PACKABLE = [dtype for dtype in TOLERANCES if unpackable_reason(dtype, CPU) is None]


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Parametrises over the element types that can be packed on this machine."""
    if request.param not in PACKABLE:
        pytest.skip(f"not packed here: {unpackable_reason(request.param, CPU)}")
    return request.param


def linear(dtype: torch.dtype, *, bias: bool = True, num_outputs: int = 40) -> torch.nn.Linear:
    """Returns a layer with 48 inputs."""
    torch.manual_seed(1)
    return torch.nn.Linear(48, num_outputs, bias=bias, dtype=dtype).requires_grad_(False)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [one for one in Activation if one not in NEVER_FUSED])
def test_a_packed_layer_is_as_exact_as_a_plain_one_and_its_activation(
    dtype: torch.dtype, activation: Activation, *, bias: bool
) -> None:
    plain = linear(dtype, bias=bias)
    layer = packed(plain, activation)
    assert layer is not None
    rows = torch.randn(300, 48).to(dtype)
    in_double = functional.linear(rows.double(), plain.weight.double(), plain.bias.double() if bias else None)
    error = relative_error(layer(rows), activation.function(in_double))
    assert error < TOLERANCES[dtype]
    assert error <= 1.05 * relative_error(activation.function(plain(rows)), activation.function(in_double))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inputs_of_any_shape_and_layout_are_taken(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    plain = linear(dtype)
    layer = packed(plain)
    assert layer is not None
    inputs = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)
    for view in (inputs[..., : shape[-1]].contiguous(), inputs[..., : shape[-1]], inputs[..., ::2]):
        found, expected = layer(view), plain(view)
        assert found.shape == expected.shape
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=4 * TOLERANCES[dtype])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda layer: setattr(layer, "bias", layer.bias + 0.1),
        lambda layer: setattr(layer, "weight", PackedLinear(torch.ones(40, 48).to(layer.bias.dtype), None).weight),
        lambda layer: setattr(layer, "_attribute", "relu"),
    ],
    ids=["bias", "weight", "activation"],
)
def test_a_layer_with_wrong_results_is_detected(dtype: torch.dtype, spoil: Any) -> None:
    plain = linear(dtype)
    layer = PackedLinear(plain.weight, plain.bias)
    assert agrees_with_plain(layer, plain, Activation.NONE)
    spoil(layer)
    assert not agrees_with_plain(layer, plain, Activation.NONE)


def lacks_capability(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cpu, "get_capabilities", lambda: {"sse4": True}, raising=False)


def lacks_one_dnn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)


def lacks_operator(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(packed_linear, "_OPERATORS", ("_no_such_operator",))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(lacks_capability, "the processor has none of"), (lacks_one_dnn, "oneDNN"), (lacks_operator, "no operator")],
)
def test_layers_that_cannot_be_packed_stay_plain(spoil: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    assert packed(linear(torch.float32)) is None
    assert reason in str(unpackable_reason(torch.float32, CPU))


@pytest.mark.parametrize(
    ("limit", "is_enough"),
    [
        ("AVX2", {torch.float32}),
        ("avx512_core", {torch.float32}),
        ("AVX512_CORE_BF16", {torch.float32, torch.bfloat16}),
        ("AVX512_CORE_AMX", {torch.float32, torch.bfloat16}),
        ("DEFAULT", {torch.float32, torch.bfloat16}),
        ("SSE41", set()),
    ],
)
def test_a_limit_of_instructions_counts(
    limit: str, is_enough: set[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"avx2": True, "avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    reasons = {dtype: unpackable_reason(dtype, CPU) for dtype in (torch.float32, torch.bfloat16)}
    assert {dtype for dtype, reason in reasons.items() if reason is None} == is_enough
    assert all("ONEDNN_MAX_CPU_ISA" in reason for reason in reasons.values() if reason is not None)


def test_only_layers_that_gain_are_packed() -> None:
    assert "float16" in str(unpackable_reason(torch.float16, CPU))
    assert "meta" in str(unpackable_reason(torch.float32, torch.device("meta")))


def test_packed_layers_are_counted_like_plain_ones(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(linear(dtype), torch.nn.Linear(40, 32, bias=False, dtype=dtype))
    plain = weight_bytes(model)
    assert replace_linears(model, packed) == 2
    assert weight_bytes(model) == plain == (48 * 40 + 40 + 40 * 32) * dtype.itemsize
