"""Embeddings of tokens out of the packed weights of an output head, for models that tie the two.

A tied model's table of embeddings and its head are one matrix. The head's kernel needs a copy in its own layout
(native_linear.py), and looking tokens up in this copy makes the table itself superfluous: 57 MB of small-llava in
bfloat16, 467 MB of Qwen2-VL-2B. Cold look-ups of 1 / 8 / 32 / 512 / 2048 tokens of small-llava take 90 / 104 / 176 /
1256 / 4949 µs, those of `torch.nn.Embedding` 110 / 109 / 124 / 276 / 776 µs (one thread, 2 × AMD EPYC, 2026-11-24); a
step takes 11 ms or more.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from lookonce.model.kernels.native_library import load_library
from lookonce.model.kernels.native_linear import SOURCES, PackedWeights


class PackedEmbedding(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A table of embeddings like `torch.nn.Embedding`, in the memory of the head's weights."""

    def __init__(self, weights: PackedWeights) -> None:
        """`weights` are the head's, `[num_embeddings, embedding_dim]`. Raises NativeLibraryError."""
        super().__init__()
        assert weights.panels is not None, "tokens are looked up in whole weights"
        self._num_words = weights.panels.shape[1]
        self.num_embeddings, self.embedding_dim = weights.num_outputs, weights.num_inputs
        # Has no elements. transformers takes a model's element type and device from its parameters.
        self.weight = torch.nn.Parameter(torch.empty(0, self.embedding_dim, dtype=weights.dtype), requires_grad=False)
        self._weights, self._struct = weights, weights.struct()
        self._function = load_library(SOURCES).function("lookonce_embedding")

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the embeddings `[…, embedding_dim]` of int64 ids `[…]`. Ids without one get the last."""
        ids = ids.contiguous()
        rows = torch.empty((*ids.shape, self.embedding_dim), dtype=self._weights.dtype)
        self._function(
            ctypes.byref(self._struct),
            ctypes.c_void_p(ids.data_ptr()),
            ctypes.c_int64(ids.numel()),
            ctypes.c_int64(self._num_words),
            ctypes.c_void_p(rows.data_ptr()),
        )
        return rows


def replace_tied_embedding(model: Any, weights: PackedWeights) -> None:
    """Makes a model look tokens up in its head's packed `weights` if its table and its head are one matrix.

    Tables that do more than look up, such as scaled ones, stay. Raises NativeLibraryError.
    """
    table = model.get_input_embeddings()
    if type(table) is not torch.nn.Embedding or table.weight is not model.lm_head.weight:
        return
    owners = [(module, name) for module in model.modules() for name, child in module.named_children() if child is table]
    for owner, name in owners:
        setattr(owner, name, PackedEmbedding(weights))
