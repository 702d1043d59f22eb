"""A pass of the language model over shapes alone: it finds numbers in config.json with which no step can be computed.

The half has no values (half_check.py), and each operator computes the shape of its result. The decoder's kernels take
the place of attention and recurrent layers, so only the shapes that their parts have in common are checked. What comes
from values, such as NaN, is found when the services start.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from lookonce.model.faults.build_faults import step_fault
from lookonce.model.half_model import text_child
from lookonce.model.model_folder import CONFIGURATION_FAULTS
from lookonce.model.structure.inner_model import with_inner_model

SHAPE_ATTENTION = "lookonce_shapes"
# The form of a mixture of experts that reads no numbers of chosen experts on the host.
SHAPE_EXPERTS = "batched_mm"
_NUM_TOKENS = 8
_META = torch.device("meta")
# Words of torch for an operator whose result's shape depends on values.
_NEEDS_VALUES = ("meta tensor", "data-dependent")


def register_shape_attention() -> None:
    """Makes SHAPE_ATTENTION known to transformers, which makes no masks for it. Repeating it is harmless."""
    AttentionInterface.register(SHAPE_ATTENTION, _attention)


def check_step(half: Any) -> None:
    """Computes the shapes of a step of `half`, a text half on the meta device with SHAPE_ATTENTION and SHAPE_EXPERTS.

    Raises ModelFolderError if an operator refuses its arguments.
    """
    name = text_child(half)
    model = with_inner_model(half.eval(), name)
    with _only_shapes(model), torch.inference_mode(), _META:
        try:
            output = getattr(model.model, name)(
                input_ids=torch.zeros(1, _NUM_TOKENS, dtype=torch.long), use_cache=False
            )
            model.lm_head(output.last_hidden_state)
        except NotImplementedError:
            # torch knows no shapes of an operator. The start computes with values.
            return
        except CONFIGURATION_FAULTS as error:
            if any(words in str(error) for words in _NEEDS_VALUES):
                return
            raise step_fault(error) from error


@contextlib.contextmanager
def _only_shapes(model: torch.nn.Module) -> Iterator[None]:
    """Lets experts and distributions look at no value inside the block."""
    for module in model.modules():
        # The configuration of mixtures that are not transformers' own (chosen_experts.py).
        if isinstance(getattr(module, "config", None), types.SimpleNamespace):
            module.config = types.SimpleNamespace(_experts_implementation=SHAPE_EXPERTS)
    is_checking = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(is_checking)


def _attention(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **_arguments: Any
) -> tuple[Tensor, None]:
    """Returns `[requests, tokens, heads, value_dim]` for queries, keys and values `[requests, heads, tokens, dim]`."""
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2), None
