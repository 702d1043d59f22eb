"""Plain layers of a model are replaced once each, and stay where the results would differ."""

from __future__ import annotations

import gc
import weakref

import torch
from structlog.testing import capture_logs

from lookonce.model.kernels.activation import Activation
from lookonce.model.kernels.linear_layers import agrees_with_plain, replace_linears


class Doubled(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A layer with a copy of another one's weight, times `factor`."""

    def __init__(self, linear: torch.nn.Linear, factor: float = 1.0) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight.detach().clone() * factor, linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, self.weight, self.bias)


def linear(num_outputs: int = 40, *, bias: bool = True) -> torch.nn.Linear:
    return torch.nn.Linear(48, num_outputs, bias=bias).requires_grad_(False)


def copied(plain: torch.nn.Linear, activation: Activation) -> torch.nn.Module:
    assert activation is Activation.NONE
    return Doubled(plain)


def test_all_plain_layers_of_a_model_are_replaced_and_their_weights_freed() -> None:
    shared = linear(48)
    model = torch.nn.Sequential(shared, torch.nn.Tanh(), torch.nn.Sequential(shared, linear(bias=False)))
    # The subclass in attention reads its weight without calling `forward`.
    model.append(torch.nn.MultiheadAttention(40, 2).requires_grad_(False))
    rows = torch.randn(7, 48)
    expected = model[:3](rows)
    weight = weakref.ref(shared.weight)
    del shared
    assert replace_linears(model, copied) == 2
    gc.collect()
    assert weight() is None
    assert model[0] is model[2][0], "one layer in two places stays one"
    assert isinstance(model[2][1], Doubled)
    assert not any(isinstance(module, Doubled) for module in model[3].modules())
    assert torch.equal(model[:3](rows), expected)


def test_layers_that_cannot_be_made_stay_and_are_logged() -> None:
    model = torch.nn.Sequential(linear(48), linear())
    with capture_logs() as logs:
        assert replace_linears(model, lambda plain, _: Doubled(plain) if plain.out_features == 48 else None) == 1
    assert [type(module) for module in model] == [Doubled, torch.nn.Linear]
    assert [(line["log_level"], line["num_layers"]) for line in logs] == [("warning", 1)]


def test_a_model_without_linear_layers_stays() -> None:
    assert replace_linears(torch.nn.Sequential(torch.nn.Tanh()), copied) == 0


def test_a_layer_with_other_results_does_not_agree() -> None:
    plain = linear()
    assert agrees_with_plain(Doubled(plain), plain, Activation.NONE)
    assert not agrees_with_plain(Doubled(plain), plain, Activation.RELU)
    assert not agrees_with_plain(Doubled(plain, 1.001), plain, Activation.NONE)
    assert not agrees_with_plain(Doubled(plain, float("nan")), plain, Activation.NONE)
