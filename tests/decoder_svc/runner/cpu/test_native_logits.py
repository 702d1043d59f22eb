"""A stack that computes embeddings and head as well gives the bits of the three one after the other."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import pytest
import torch

from decoder_svc.runner.attention import AttentionMetadata, BlockMetadata, forward_context
from decoder_svc.runner.cpu.native_stack import NativeStack
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.language_pass import LanguagePass
from lookonce.model.kernels.native_level import processor_levels
from lookonce.model.kernels.packed_embedding import PackedEmbedding
from lookonce.model.structure.fixed_embeddings import FixedEmbeddings
from tests.decoder_svc.runner.cpu.loaded_runner import BLOCK_SIZE, load, text_model, tie_head
from tests.tiny_families import FAMILIES

pytestmark = pytest.mark.usefixtures("library")

# Two sequences: a chunk of a prompt, and a single token behind cached ones.
LENGTHS, CACHED = (13, 1), (0, 9)
SAMPLED = {
    "all": None,
    "the last of each": torch.tensor([12, 13]),
    "one": torch.tensor([3]),
    "none": torch.tensor([], dtype=torch.int64),
}


def loaded(name: str, folder: pathlib.Path, dtype: torch.dtype, bits: int | None, *, is_tied: bool) -> CPUModelRunner:
    FAMILIES[name].build(folder)
    if is_tied:
        tie_head(folder)
    runner = load(folder, dtype, bits)
    runner.initialize_kv_cache(8)
    return runner


def metadata() -> AttentionMetadata:
    tables = (torch.tensor([5, 0]), torch.tensor([3, 6]))
    slots = [
        int(table[token // BLOCK_SIZE]) * BLOCK_SIZE + token % BLOCK_SIZE
        for table, length, cached in zip(tables, LENGTHS, CACHED, strict=True)
        for token in range(cached, cached + length)
    ]
    stops = tuple(length + cached for length, cached in zip(LENGTHS, CACHED, strict=True))
    return AttentionMetadata(BlockMetadata(torch.tensor(slots), tables, (0, 0)), None, LENGTHS, stops, ((), ()), False)


@pytest.mark.parametrize("level", [level.name for level in processor_levels()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# One axis of positions and three; with the table of embeddings as a matrix of its own and as the head.
@pytest.mark.parametrize(
    ("name", "is_tied", "bits"),
    [
        ("llava_clip", False, None),
        ("llava_clip", True, None),
        ("llava_clip", False, 8),
        ("llava_clip", False, 4),
        ("qwen2_5_vl", False, None),
        ("qwen2_5_vl", True, 4),
    ],
)
def test_logits_are_those_of_the_head_behind_the_layers(
    name: str,
    is_tied: bool,
    bits: int | None,
    dtype: torch.dtype,
    level: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOOKONCE_NATIVE_LEVEL", level)
    runner = loaded(name, tmp_path, dtype, bits, is_tied=is_tied)
    stack, model, axes = text_model(runner), runner.model, runner.family.num_position_axes
    assert isinstance(stack, NativeStack)
    table = model.get_input_embeddings()
    assert isinstance(table, PackedEmbedding) == (is_tied and bits is None)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(table.num_embeddings, (sum(LENGTHS),), generator=generator)
    # It is behind the table, as a placeholder may be, and gets the last embedding.
    ids[4] = table.num_embeddings + 7
    positions = torch.cat([torch.arange(length) + cached for length, cached in zip(LENGTHS, CACHED, strict=True)])
    embeddings = table(ids.clamp(max=table.num_embeddings - 1))
    for each_axis in (1, 2):
        # With other positions on the second axis, angles are computed and not taken from the table.
        on_axes = torch.stack([positions * (each_axis if axis == 1 else 1) for axis in range(axes)])
        with torch.inference_mode(), forward_context(runner.backend, metadata()):
            shaped = on_axes if axes == 1 else on_axes[:, None]
            hidden = stack(inputs_embeds=embeddings[None], position_ids=shaped).last_hidden_state[0]
            for sampled in SAMPLED.values():
                wanted = model.lm_head(hidden if sampled is None else hidden[sampled])
                assert wanted.isfinite().all()
                assert torch.equal(stack.logits(on_axes, sampled, embeddings=embeddings), wanted)
                assert torch.equal(stack.logits(on_axes, sampled, token_ids=ids), wanted)
            # The numbers say something about the tokens.
            others = stack.logits(on_axes, None, token_ids=ids.flip(0))
            assert not torch.equal(others, stack.logits(on_axes, None, token_ids=ids))


@pytest.mark.parametrize("index", [-1, 14])
def test_a_sampled_index_of_no_token_is_refused(index: int, tmp_path: pathlib.Path) -> None:
    runner = loaded("llava_clip", tmp_path, torch.float32, None, is_tied=False)
    stack = text_model(runner)
    assert isinstance(stack, NativeStack)
    positions = torch.arange(14)[None]
    with forward_context(runner.backend, metadata()), pytest.raises(IndexError, match="outside of 14 tokens"):
        stack.logits(positions, torch.tensor([0, index]), token_ids=torch.arange(14))


def test_other_embeddings_than_those_of_the_table_are_looked_up_before(tmp_path: pathlib.Path) -> None:
    language = loaded("llava_clip", tmp_path, torch.float32, None, is_tied=False).language
    assert isinstance(language, LanguagePass)
    assert language.takes_ids
    fixed = FixedEmbeddings(torch.tensor([3]), torch.zeros(1, language.model.get_input_embeddings().embedding_dim))
    assert not replace(language, fixed_embeddings=fixed).takes_ids
    assert not replace(language, is_direct=False).takes_ids
