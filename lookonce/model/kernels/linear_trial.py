"""Chooses the implementation of linear layers for this machine: our kernel, oneDNN's packed layers or PyTorch's own."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from lookonce.model.kernels.activation import Activation
from lookonce.model.kernels.kernel_choice import NATIVE, PYTORCH, KernelChoice
from lookonce.model.kernels.kernel_trial import Candidate, choose_kernel
from lookonce.model.kernels.linear_layers import LayerMaker
from lookonce.model.kernels.native_compiler import NativeLibraryError
from lookonce.model.kernels.native_linear import SOURCES, native_linear
from lookonce.model.kernels.packed_linear import packed

ONEDNN = "onednn"
# Inputs and outputs of the layer that is timed.
_SIZE = 1024
# Numbers of rows with the repetitions of each in one trial, so that all take a similar part of its time.
_REPEATS_OF_STEPS = {1: 64, 8: 16, 64: 4, 512: 1}
_REPEATS_OF_IMAGES = {576: 1}


def choose_step_linear(dtype: torch.dtype) -> KernelChoice:
    """Returns the choice for language models: "native" or "pytorch". One implementation serves all batch sizes."""
    makers: dict[str, LayerMaker] = {NATIVE: functools.partial(native_linear, num_threads=1)}
    return _choice("linear layers", dtype, makers, Activation.NONE, _REPEATS_OF_STEPS)


def choose_image_linear(dtype: torch.dtype) -> KernelChoice:
    """Returns the choice for vision towers, with a fused activation: "onednn", "native" or "pytorch"."""
    makers: dict[str, LayerMaker] = {ONEDNN: packed, NATIVE: functools.partial(native_linear, num_threads=1)}
    return _choice("linear layers of images", dtype, makers, Activation.GELU_TANH, _REPEATS_OF_IMAGES)


def layer_maker(choice: KernelChoice) -> LayerMaker | None:
    """Returns the function that makes a layer of the chosen implementation; None for PyTorch's own layers."""
    if choice.implementation == ONEDNN:
        return packed
    if choice.implementation == NATIVE:
        return functools.partial(native_linear, num_threads=torch.get_num_threads())
    return None


def _choice(
    name: str,
    dtype: torch.dtype,
    makers: Mapping[str, LayerMaker],
    activation: Activation,
    repeats: Mapping[int, int],
) -> KernelChoice:
    @functools.cache
    def plain() -> torch.nn.Linear:
        layer = torch.nn.Linear(_SIZE, _SIZE, dtype=dtype).requires_grad_(False)
        layer.weight.normal_(generator=torch.Generator().manual_seed(0))
        return layer

    def trial(layer: torch.nn.Module) -> Candidate:
        inputs = {torch.ones(rows, _SIZE, dtype=dtype): count for rows, count in repeats.items()}

        def run() -> None:
            for rows, count in inputs.items():
                for _ in range(count):
                    layer(rows)

        return run

    def prepared(make: LayerMaker) -> Candidate:
        layer = make(plain(), activation)
        if layer is None:
            raise NativeLibraryError("it cannot compute this layer")
        return trial(layer)

    def in_pytorch() -> Candidate:
        return trial(torch.nn.Sequential(plain(), _Function(activation)))

    candidates = {kind: functools.partial(prepared, make) for kind, make in makers.items()}
    type_name = str(dtype).removeprefix("torch.")
    return choose_kernel(f"{name} {type_name}", SOURCES, {**candidates, PYTORCH: in_pytorch})


class _Function(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """An activation as a module."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self._function = activation.function

    def forward(self, outputs: torch.Tensor) -> torch.Tensor:
        return self._function(outputs)
