"""Mixtures of experts by our kernel (native/experts.cpp), in place of transformers' modules.

`experts_of` compares a module's rule with ours, on a few random weights. The kernel is compared here, on the module's
weights.
"""

from __future__ import annotations

import ctypes
import logging

import torch
from torch import Tensor

from decoder_svc.runner.cpu.attention import DTYPE_NAMES, NativeBackend
from decoder_svc.runner.cpu.native_stack import LANES, interleaved
from decoder_svc.runner.cpu.native_structures import Experts, ExpertStep
from lookonce.model.kernels.load_progress import LoadProgress
from lookonce.model.kernels.native_linear import Linear, PackedWeights, packed
from lookonce.model.kernels.quantized_experts import ExpertWeights, QuantizedExperts, experts_of
from lookonce.model.kernels.quantized_weight import padded

logger = logging.getLogger(__name__)

# Largest accepted difference from PyTorch's operators on random tokens, relative to the norm of its results.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
_NUM_CHECKED_TOKENS = 5


class NativeExperts(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Replaces the experts of a layer; takes and returns the same."""

    def __init__(self, weights: ExpertWeights, backend: NativeBackend) -> None:
        """Copies the weights, which may be released afterwards."""
        super().__init__()
        self._dtype = weights.dtype
        self._num_threads = backend.num_threads
        missing = -weights.mlp_size % LANES
        up: list[PackedWeights] = []
        down: list[PackedWeights] = []
        for expert in range(weights.num_experts):
            first, last = weights.read(expert)
            # Pad to whole vectors with zero weights, which change no result.
            wide = [padded(part, missing) for part in first]
            up.append(packed(interleaved(wide) if weights.is_gated else wide[0]))
            down.append(packed(padded(last, num_inputs=missing)))
        # The structures point into the weights.
        self._weights = (up, down)
        self._experts = Experts(
            up=(Linear * len(up))(*(one.struct() for one in up)),
            down=(Linear * len(down))(*(one.struct() for one in down)),
            num_experts=weights.num_experts,
            hidden_size=weights.hidden_size,
            mlp_size=weights.mlp_size + missing,
            activation=weights.activation.value,
            is_gated=weights.is_gated,
        )
        self._function = backend.library.function(f"lookonce_experts_{DTYPE_NAMES[self._dtype]}")

    @property
    def nbytes(self) -> int:
        """Bytes that the packed weights take."""
        return sum(weights.nbytes for all_weights in self._weights for weights in all_weights)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Takes transformers' arguments: tokens `[T, hidden]`, and numbers and weights of their experts `[T, k]`."""
        inputs, experts = hidden_states.contiguous(), top_k_index.to(torch.int64).contiguous()
        assert inputs.dtype == self._dtype, f"inputs are {inputs.dtype}, weights {self._dtype}"
        weights = top_k_weights.to(torch.float32).contiguous()
        output = torch.empty_like(inputs)
        step = ExpertStep(
            input=inputs.data_ptr(),
            experts=experts.data_ptr(),
            weights=weights.data_ptr(),
            output=output.data_ptr(),
            num_tokens=inputs.numel() // inputs.shape[-1],
            num_chosen=experts.shape[-1],
            num_threads=self._num_threads,
        )
        self._function(ctypes.byref(self._experts), ctypes.byref(step))
        return output


def replace_experts(model: torch.nn.Module, backend: NativeBackend) -> int:
    """Replaces the experts of a model's layers in place, one layer after the other; returns the number of layers.

    Experts of other shapes and rules stay, and so do those whose results differ from those by PyTorch.
    """
    found = [
        (parent, name, weights)
        for parent in model.modules()
        for name, child in parent.named_children()
        if (weights := experts_of(child)) is not None and _is_supported(weights)
    ]
    num_replaced = 0
    progress = LoadProgress("experts are copied into the kernels' layout", len(found))
    while found:
        parent, name, weights = found.pop()
        with torch.inference_mode():
            native = NativeExperts(weights, backend)
            progress.add(native.nbytes)
            difference = _difference(QuantizedExperts(weights, getattr(parent, name)), native, weights)
        # Written with `not` so that NaN fails.
        if not difference <= _TOLERANCE[weights.dtype]:
            logger.warning("experts stay as they are: results differ from PyTorch's by %.2g", difference)
            continue
        setattr(parent, name, native)
        num_replaced += 1
    return num_replaced


def _is_supported(weights: ExpertWeights) -> bool:
    return weights.dtype in DTYPE_NAMES and weights.hidden_size % LANES == 0


def _difference(plain: QuantizedExperts, native: NativeExperts, weights: ExpertWeights) -> float:
    """Returns the distance of both results for random tokens, relative to the norm of the first.

    transformers' own modules fail where a rank's share of the units is no multiple of 16 bytes (`grouped_mm`).
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(_NUM_CHECKED_TOKENS, weights.hidden_size, generator=generator).to(weights.dtype)
    num_chosen = min(2, weights.num_experts)
    chosen = torch.rand(_NUM_CHECKED_TOKENS, weights.num_experts, generator=generator).topk(num_chosen).indices
    shares = torch.rand(_NUM_CHECKED_TOKENS, num_chosen, generator=generator).to(weights.dtype)
    expected = plain(tokens, chosen, shares).float()
    return float((native(tokens, chosen, shares).float() - expected).norm() / expected.norm())
