"""Embeddings of tokens that are not in a language model's table take the places of those that are."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lookonce.model.half_model import load_text_half
from lookonce.model.structure.fixed_embeddings import FixedEmbeddings, embedders, fixed_embeddings
from tests import tiny_models
from tests.quantized_folders import FORMS, store_quantized
from tests.tiny_families import FAMILIES

WIDTH = 3


@given(
    fixed=st.sets(st.integers(0, 40), min_size=1),
    token_ids=st.lists(st.integers(0, 50), max_size=20),
)
def test_rows_of_these_ids_replace_those_of_the_table(fixed: set[int], token_ids: list[int]) -> None:
    ids = torch.tensor(sorted(fixed))
    embeddings = FixedEmbeddings(ids, 100.0 + ids[:, None].float().expand(-1, WIDTH))
    tokens = torch.tensor(token_ids, dtype=torch.int64)
    table = torch.randn(len(tokens), WIDTH)
    for token_id, looked_up, found in zip(token_ids, table, embeddings(tokens, table), strict=True):
        assert torch.equal(found, torch.full((WIDTH,), 100.0 + token_id) if token_id in fixed else looked_up)


def test_a_model_whose_table_has_all_tokens_has_none(family_folder: Callable[[str], pathlib.Path]) -> None:
    half = load_text_half(family_folder("llava_clip"), torch.float32, "sdpa")
    assert not embedders(half.config)
    assert fixed_embeddings(half) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gemma3n"])
def test_a_text_half_keeps_the_rows_of_the_ids_and_not_the_modules(
    name: str, dtype: torch.dtype, family_folder: Callable[[str], pathlib.Path]
) -> None:
    half = load_text_half(family_folder(name), dtype, "sdpa")
    whole = tiny_models.load_model(family_folder(name)).to(dtype)
    parts = embedders(half.config)
    assert set(parts) == {"embed_vision", "embed_audio"}
    assert not any(list(getattr(half.model, part).parameters()) for part in parts)
    found = fixed_embeddings(half)
    assert found is not None
    assert found.ids.tolist() == sorted(token_id for ids in parts.values() for token_id in ids)
    assert found.rows.dtype is dtype
    for part, ids in parts.items():
        with torch.no_grad():
            rows = getattr(whole.model, part)(input_ids=torch.tensor(ids))
        assert torch.equal(found.rows[torch.isin(found.ids, torch.tensor(ids))], rows)


@pytest.mark.parametrize("name", ["gemma3n"])
def test_modules_with_codes_give_the_rows_of_the_weights_that_the_codes_stand_for(
    name: str, tmp_path: pathlib.Path
) -> None:
    for folder in ("stored", "whole"):
        (tmp_path / folder).mkdir()
        FAMILIES[name].build(tmp_path / folder)
    layers = ["model.embed_vision.embedding_projection", "model.embed_audio.embedding_projection"]
    assert set(layers) <= set(
        store_quantized(tmp_path / "stored", FORMS["compressed-int8"], tmp_path / "whole", others=layers)
    )
    stored, whole = (
        fixed_embeddings(load_text_half(tmp_path / folder, torch.float32, "eager", keep_codes=True))
        for folder in ("stored", "whole")
    )
    assert stored is not None
    assert whole is not None
    assert torch.equal(stored.rows, whole.rows)
