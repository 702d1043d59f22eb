"""Embeddings of token ids that a model does not look up in the table of its language model.

Gemma 3n embeds the markers of images and of sound by modules beside its language model, one of which stands behind
every image. For a token id, such a module gives the same row each time. The text half therefore keeps the rows of these
ids, and not the modules. Muse Glimmer embeds a placeholder without an image as token 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lookonce.families.registry import FAMILIES

_NAME = "fixed_embeddings"


class FixedEmbeddings(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """The embeddings of some token ids. They are buffers, so they move to a device with the model."""

    ids: Tensor
    rows: Tensor

    def __init__(self, ids: Tensor, rows: Tensor) -> None:
        """`ids` are int64 `[num_ids]`, ascending; `rows` their embeddings `[num_ids, hidden_size]`."""
        super().__init__()
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("rows", rows, persistent=False)

    def forward(self, token_ids: Tensor, embeddings: Tensor) -> Tensor:
        """Returns the embeddings `[num_tokens, hidden_size]` with those of these ids in their places.

        The host reads nothing, so the operators can be recorded as a graph.
        """
        places = torch.searchsorted(self.ids, token_ids).clamp(max=len(self.ids) - 1)
        is_fixed = self.ids[places] == token_ids
        return torch.where(is_fixed[:, None], self.rows[places], embeddings)


def embedders(config: Any) -> Mapping[str, range]:
    """Returns the token ids that each module beside the language model embeds, by its name in the inner model."""
    family = FAMILIES.get(config.model_type)
    return {} if family is None else family.embedders(config)


def fix_embeddings(model: Any) -> None:
    """Computes what a loaded text half gives for these ids, and replaces embedders by the rows."""
    rows: dict[int, Tensor] = {}
    for name, ids in embedders(model.config).items():
        with torch.no_grad():
            rows |= zip(ids, getattr(model.model, name)(input_ids=torch.tensor(ids)), strict=True)
        setattr(model.model, name, torch.nn.Module())
    family = FAMILIES.get(model.config.model_type)
    for token_id in () if family is None else family.ids_embedded_as_0(model.config):
        with torch.no_grad():
            (rows[token_id],) = model.get_input_embeddings()(torch.zeros(1, dtype=torch.int64))
    if rows:
        all_ids = torch.tensor(sorted(rows))
        all_rows = torch.stack([rows[token_id] for token_id in sorted(rows)])
        setattr(model.model, _NAME, FixedEmbeddings(all_ids, all_rows.to(model.dtype)))


def fixed_embeddings(model: Any) -> FixedEmbeddings | None:
    """Returns the embeddings that `fix_embeddings` left in a text half; None if its table has all."""
    return getattr(model.model, _NAME, None)
