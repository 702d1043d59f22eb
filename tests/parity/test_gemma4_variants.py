"""Gemma 4 folders that differ in everything that folders of the family may differ in, against `generate`."""

from __future__ import annotations

import json
import pathlib
import random
from typing import Any

import pytest
import torch

from decoder_svc.scheduling.prompt import Prompt
from tests import tiny_models
from tests.parity import families, offline
from tests.tiny_families import FAMILIES, gemma4

NUM_PROMPTS = 5


def text_settings(rng: random.Random) -> dict[str, Any]:
    """Draws the layers, and what they have in common."""
    middle = [rng.choice(("sliding_attention", "full_attention")) for _ in range(rng.randint(1, 5))]
    kinds = ["sliding_attention", *middle, "full_attention"]
    if rng.random() < 0.2:
        kinds = ["full_attention"] * len(kinds)
    # Layers without keys need an earlier one of each type.
    shared = [number for number in range(len(kinds) - 1) if set(kinds[: len(kinds) - number]) == set(kinds)]
    settings = {
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "num_kv_shared_layers": rng.choice(shared),
        "use_double_wide_mlp": rng.random() < 0.5,
        "sliding_window": rng.choice((3, 7, 10, 40)),
        "head_dim": rng.choice((16, 32)),
        "global_head_dim": rng.choice((16, 32, 48)),
        "use_bidirectional_attention": rng.choice((None, "vision")),
        "attention_k_eq_v": rng.random() < 0.5,
        "num_global_key_value_heads": rng.choice((1, 2, 4)),
        "final_logit_softcapping": rng.choice((None, 30.0)),
    }
    # transformers 5.23 fails on layers without keys in a model without per-layer inputs.
    settings["hidden_size_per_layer_input"] = rng.choice((8, 16) if settings["num_kv_shared_layers"] else (0, 8))
    if rng.random() < 0.4:
        settings |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        settings["moe_intermediate_size"] = rng.choice((tiny_models.HIDDEN_SIZE, 40))
    return settings


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_those_of_generate(seed: int, tmp_path: pathlib.Path) -> None:
    rng = random.Random(seed)
    vision = {"standardize": rng.random() < 0.5, "use_clipped_linears": rng.random() < 0.5}
    gemma4.build_with(tmp_path, seed, text_settings(rng), vision, None)
    family = families.build(FAMILIES["gemma4"], tmp_path, NUM_PROMPTS)
    expected = [question.expected for question in family.offline.questions]
    spans = [span.length for question in family.offline.questions for span in question.prompt.mutual_spans]
    for budget in (2048, max([16, *spans]) + rng.randint(0, 20)):
        assert offline.run(family.offline, max_num_batched_tokens=budget)[0] == expected


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() & {"gemma4", "gemma4_moe", "gemma4_unified"}))
@pytest.mark.parametrize("token", ["image_token_id", "video_token_id", "audio_token_id"])
def test_tokens_of_media_without_rows_count_as_padding(name: str, token: str, tmp_path: pathlib.Path) -> None:
    """A prompt of tokens may have one without an image, and the model looks it up as padding."""
    FAMILIES[name].build(tmp_path)
    family = families.build(FAMILIES[name], tmp_path, 1)
    reference = tiny_models.load_model(tmp_path)
    number = getattr(reference.config, token)
    ids = [2, 300, 301, number, 302, number, 303]
    given = torch.tensor([ids])
    rest = {"attention_mask": torch.ones_like(given), "mm_token_type_ids": torch.zeros_like(given)}
    count = offline.MAX_NEW_TOKENS
    with torch.inference_mode():
        output = reference.generate(given, **rest, do_sample=False, max_new_tokens=count, min_new_tokens=count)
    for budget in (2048, 3):
        session = offline.Session(family.offline, max_num_batched_tokens=budget)
        assert session.ask([Prompt(tuple(ids))]).token_ids == [output[0, len(ids) :].tolist()]


@pytest.mark.parametrize("name", ["gemma4_unified"])
def test_generate_with_its_default_cache_has_another_mask_for_images(name: str, tmp_path: pathlib.Path) -> None:
    """Once transformers corrects this, the tiny model need not ask for a static cache any more."""
    FAMILIES[name].build(tmp_path)
    expected = [question.expected for question in families.build(FAMILIES[name], tmp_path, 3).offline.questions]
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation.pop("cache_implementation") == "static"
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    others = [question.expected for question in families.build(FAMILIES[name], tmp_path, 3).offline.questions]
    assert [one == other for one, other in zip(expected, others, strict=True)] == [True, False, False]
