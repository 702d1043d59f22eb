"""The inner model of a vision-language model: the module whose children are tower, projector and language model.

In most architectures, it is `model.model`, and the head lies beside it. In Llama 4, the parts lie in the model itself,
and its language model is a causal model with a head of its own. `with_inner_model` gives a half of such a model the
structure of the others after its weights are loaded. Weights are loaded under the names that they have in files.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import EmbeddingAccessMixin


def has_inner_model(model: Any) -> bool:
    """Whether the parts of a vision-language model lie in `model.model`, and not in the model itself."""
    return hasattr(model, "model")


def inner_model(model: Any) -> Any:
    """Returns the module whose children are tower, projector and language model."""
    return model.model if has_inner_model(model) else model


def with_inner_model(model: Any, text: str | None) -> Any:
    """Returns a loaded half as a model whose `model` is its inner model.

    `text` is the language model's name in the text half, None in the vision half. The text half of a model without an
    inner model is its causal language model.
    """
    if has_inner_model(model):
        return model
    if text is None:
        # An attribute, but no child module: a module must not contain itself.
        vars(model)["model"] = model
        return model
    causal = getattr(model, text)
    causal.model = _InnerModel(text, causal.model)
    causal.base_model_prefix = "model"
    return causal


class _InnerModel(torch.nn.Module, EmbeddingAccessMixin):  # type: ignore[misc]
    """Holds a language model under the name that it has in its vision-language model."""

    def __init__(self, name: str, language_model: torch.nn.Module) -> None:
        super().__init__()
        self._name = name
        self.add_module(name, language_model)

    def forward(self, **arguments: Any) -> Any:
        """Returns the language model's output."""
        return getattr(self, self._name)(**arguments)
