"""Embeddings of token ids that a model does not look up in the table of its language model.

Gemma 3n embeds the markers of images and of sound by modules beside its language model, one of which stands behind
every image. For a token id, such a module gives the same row each time. The text half therefore keeps the rows of these
ids, and not the modules.
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
    """Computes what the embedders of a loaded text half give for their ids, and replaces them by the rows."""
    ids_of = sorted(embedders(model.config).items(), key=lambda item: item[1].start)
    if not ids_of:
        return
    parts = []
    for name, ids in ids_of:
        with torch.no_grad():
            parts.append(getattr(model.model, name)(input_ids=torch.tensor(ids)))
        setattr(model.model, name, torch.nn.Module())
    all_ids = torch.tensor([token_id for _, ids in ids_of for token_id in ids])
    setattr(model.model, _NAME, FixedEmbeddings(all_ids, torch.cat(parts).to(model.dtype)))


def fixed_embeddings(model: Any) -> FixedEmbeddings | None:
    """Returns the embeddings that `fix_embeddings` left in a text half; None if its table has all."""
    return getattr(model.model, _NAME, None)
