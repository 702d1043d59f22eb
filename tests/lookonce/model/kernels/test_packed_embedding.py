"""Embeddings out of the head's packed weights: the same as PyTorch's, and no id reads outside the table."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lookonce.model.kernels.native_linear import packed
from lookonce.model.kernels.packed_embedding import PackedEmbedding

pytestmark = pytest.mark.usefixtures("library")


@given(
    shape=st.sampled_from([(0,), (1,), (40,), (3, 5)]),
    num_embeddings=st.integers(1, 150),
    embedding_dim=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1 << 30),
)
def test_embeddings_are_bit_equal_to_pytorchs(
    shape: tuple[int, ...], num_embeddings: int, embedding_dim: int, dtype: torch.dtype, seed: int
) -> None:
    embedding_dim += embedding_dim % 2
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_embeddings, embedding_dim, generator=generator).to(dtype)
    ids = torch.randint(num_embeddings, shape, generator=generator)
    found = PackedEmbedding(packed(weight))(ids)
    assert found.dtype is dtype
    assert torch.equal(found, torch.nn.functional.embedding(ids, weight))
    # Every other id: the tensor is not contiguous.
    assert torch.equal(PackedEmbedding(packed(weight))(ids.flatten()[::2]), weight[ids.flatten()[::2]])


def test_ids_outside_the_table_get_its_last_embedding() -> None:
    weight = torch.randn(40, 6)
    found = PackedEmbedding(packed(weight))(torch.tensor([40, 41, 1 << 40, -1, -(1 << 62)]))
    assert torch.equal(found, weight[[39] * 5])


def test_a_model_finds_its_type_and_nothing_to_count_in_a_packed_table() -> None:
    table = PackedEmbedding(packed(torch.randn(40, 6).bfloat16()))
    assert (table.num_embeddings, table.embedding_dim) == (40, 6)
    assert table.weight.dtype is torch.bfloat16
    assert table.weight.nbytes == 0
