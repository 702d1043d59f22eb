"""Activations of which a layer keeps the largest, without a number that the host makes in each step.

In some layers of Gemma 3n, units of the MLP below a limit count as zero. The limit is the mean plus a fixed number of
standard deviations. transformers computes that number in each pass, and copies it to the device, for which the host
waits. Steps with such copies cannot be recorded as graphs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The method of transformers' modules that computes such activations, and the field with the share of zeros.
_METHOD, _SHARE = "_gaussian_topk", "activation_sparsity"


def fix_sparse_activations(text_model: Any, dtype: torch.dtype) -> None:
    """Lets the layers of a language model compute the same activations with a number that is computed once, here."""
    for module in text_model.modules():
        if hasattr(module, _METHOD) and getattr(module, _SHARE) > 0.0:
            share = torch.tensor(getattr(module, _SHARE), dtype=torch.float32)
            num_deviations = torch.distributions.Normal(0, 1).icdf(share).to(dtype).item()
            setattr(module, _METHOD, functools.partial(_above_limit, num_deviations))


def _above_limit(num_deviations: float, units: Tensor) -> Tensor:
    limit = units.mean(-1, keepdim=True) + units.std(-1, keepdim=True, unbiased=False) * num_deviations
    return F.relu(units - limit)
