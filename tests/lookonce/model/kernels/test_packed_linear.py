"""Packed layers give the results of plain ones, and plain layers stay where packing is not possible."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch.nn import functional

from lookonce.model.kernels import packed_linear
from lookonce.model.kernels.packed_linear import Activation, PackedLinear, pack_linears, packed, unpackable_reason
from lookonce.model.weight_bytes import weight_bytes

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 3e-3}
SHAPES = [(1, 48), (5, 48), (2, 3, 48), (48,), (0, 48), (2, 0, 48)]
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
@pytest.mark.parametrize("activation", Activation)
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
    assert layer.agrees_with(plain.weight, plain.bias)
    spoil(layer)
    assert not layer.agrees_with(plain.weight, plain.bias)


def test_all_plain_layers_of_a_model_are_replaced_and_their_weights_freed(dtype: torch.dtype) -> None:
    shared = linear(dtype, num_outputs=48)
    model = torch.nn.Sequential(shared, torch.nn.Tanh(), torch.nn.Sequential(shared, linear(dtype, bias=False)))
    # The subclass in attention reads its weight without calling `forward`.
    model.append(torch.nn.MultiheadAttention(40, 2, dtype=dtype).requires_grad_(False))
    rows = torch.randn(7, 48).to(dtype)
    expected = model[:3](rows)
    weight = weakref.ref(shared.weight)
    del shared
    with capture_logs() as logs:
        assert pack_linears(model) == 2
    gc.collect()
    assert weight() is None
    assert model[0] is model[2][0], "one layer in two places stays one"
    assert isinstance(model[2][1], PackedLinear)
    assert not any(isinstance(module, PackedLinear) for module in model[3].modules())
    torch.testing.assert_close(model[:3](rows), expected, rtol=TOLERANCES[dtype], atol=4 * TOLERANCES[dtype])
    assert [(line["event"], line["num_layers"]) for line in logs] == [("linear layers packed", 2)]


def test_layers_that_are_named_are_left_alone(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(linear(dtype), torch.nn.Sequential(linear(dtype), linear(dtype)))
    assert pack_linears(model, skip={"0", "1.1"}) == 1
    assert [type(module).__name__ for module in (model[0], *model[1])] == ["Linear", "PackedLinear", "Linear"]


def test_a_layer_that_packing_would_change_stays_and_is_logged(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedLinear, "agrees_with", lambda *_: False)
    model = torch.nn.Sequential(linear(dtype))
    with capture_logs() as logs:
        assert pack_linears(model) == 0
    assert type(model[0]) is torch.nn.Linear
    assert [line["log_level"] for line in logs] == ["info", "warning"]


def lacks_capability(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True}, raising=False)


def lacks_one_dnn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)


def lacks_operator(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(packed_linear, "_OPERATORS", ("_no_such_operator",))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(lacks_capability, "the processor has none of"), (lacks_one_dnn, "oneDNN"), (lacks_operator, "no operator")],
)
def test_layers_that_cannot_be_packed_stay_plain_and_the_log_has_the_reason(
    spoil: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    model = torch.nn.Sequential(linear(torch.float32))
    assert packed(model[0]) is None
    with capture_logs() as logs:
        assert pack_linears(model) == 0
    assert type(model[0]) is torch.nn.Linear
    assert reason in logs[0]["reason"]


def test_only_layers_that_gain_are_packed() -> None:
    assert "float16" in str(unpackable_reason(torch.float16, CPU))
    assert "meta" in str(unpackable_reason(torch.float32, torch.device("meta")))
    assert pack_linears(torch.nn.Sequential(torch.nn.Tanh())) == 0


def test_packed_layers_are_counted_like_plain_ones(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(linear(dtype), torch.nn.Linear(40, 32, bias=False, dtype=dtype))
    plain = weight_bytes(model)
    assert pack_linears(model) == 2
    assert weight_bytes(model) == plain == (48 * 40 + 40 + 40 * 32) * dtype.itemsize
