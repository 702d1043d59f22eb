"""Linear layers by the kernel: right products, bit-equal for a token in any batch."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.model.kernels.activation import Activation
from lookonce.model.kernels.linear_layers import replace_linears
from lookonce.model.kernels.native_linear import NativeLinear, native_linear, packable, packed

pytestmark = pytest.mark.usefixtures("library")


def linear(weight: torch.Tensor, bias: torch.Tensor | None, output_dtype: torch.dtype | None = None) -> NativeLinear:
    return NativeLinear(packed(weight, bias), num_threads=2, output_dtype=output_dtype)


@settings(max_examples=100)
@given(
    num_rows=st.integers(1, 40),
    num_inputs=st.integers(1, 70),
    num_outputs=st.integers(1, 150),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_bias=st.booleans(),
    wants_float32=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_a_layer_computes_the_product(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, has_bias: bool, wants_float32: bool, seed: int
) -> None:
    num_inputs += num_inputs % 2
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype) if has_bias else None
    inputs = torch.randn(2, num_rows, num_inputs, generator=generator).to(dtype)
    outputs = linear(weight, bias, torch.float32 if wants_float32 else None)(inputs)
    assert outputs.dtype == (torch.float32 if wants_float32 else dtype)
    wanted = torch.nn.functional.linear(inputs.double(), weight.double(), None if bias is None else bias.double())
    tolerance = 1e-5 if outputs.dtype is torch.float32 else 1e-2
    torch.testing.assert_close(outputs.double(), wanted, rtol=tolerance, atol=tolerance * num_inputs**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", Activation)
def test_a_fused_activation_is_as_exact_as_pytorchs(activation: Activation, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    plain = torch.nn.Linear(48, 40, dtype=dtype).requires_grad_(False)
    # From where all activations are 0 to where they are the identity.
    plain.bias.copy_(torch.linspace(-12, 12, 40))
    layer = native_linear(plain, activation, num_threads=2)
    assert layer is not None
    rows = torch.randn(300, 48, generator=generator).to(dtype)
    exact = activation.function(torch.nn.functional.linear(rows.double(), plain.weight.double(), plain.bias.double()))
    found, in_pytorch = layer(rows), activation.function(plain(rows))
    error = (found.double() - exact).norm()
    assert error <= 1.1 * (in_pytorch.double() - exact).norm() + 1e-7 * exact.norm()
    torch.testing.assert_close(found.double(), exact, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bit_equal_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = linear(torch.randn(96, 576, generator=generator).to(dtype), None)
    rows = torch.randn(700, 576, generator=generator).to(dtype)
    together = layer(rows)
    for index in (0, 1, 11, 12, 350, 699):
        assert torch.equal(layer(rows[index]), together[index])


def test_rows_that_are_not_contiguous_are_read_correctly() -> None:
    weight, rows = torch.randn(8, 6), torch.randn(6, 5)
    torch.testing.assert_close(linear(weight, None)(rows.T), rows.T @ weight.T)


def test_layers_that_cannot_be_packed_are_left_alone() -> None:
    assert not packable(torch.nn.Linear(3, 4, dtype=torch.bfloat16))
    assert not packable(torch.nn.Linear(4, 4, dtype=torch.float16))

    class OwnLinear(torch.nn.Linear):  # type: ignore[misc]  # torch is untyped here
        """A subclass with its own `forward`, which must not be replaced."""

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(OwnLinear(4, 4), torch.nn.Linear(4, 2)))
    inputs = torch.randn(3, 4)
    wanted = model(inputs)
    assert replace_linears(model, functools.partial(native_linear, num_threads=1)) == 2
    assert type(model[1][0]) is OwnLinear
    torch.testing.assert_close(model(inputs), wanted)
