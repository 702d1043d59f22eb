"""Llama 4 folders with layers, chunks and temperatures of any kind, against `generate`."""

from __future__ import annotations

import pathlib
import random
from typing import Any

import pytest
import torch

from decoder_svc.scheduling.prompt import Prompt
from tests import tiny_models
from tests.parity import families, offline
from tests.parity.ways import check_in_all_ways
from tests.tiny_families import FAMILIES, llama4

NUM_PROMPTS, NUM_ANSWER_TOKENS = 4, 60


def text_settings(rng: random.Random) -> dict[str, Any]:
    """Draws the layers, and what they have in common."""
    num_layers = rng.randint(2, 5)
    has_rope = [rng.randint(0, 1) for _ in range(num_layers)]
    settings: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "no_rope_layers": has_rope,
        "moe_layers": sorted(rng.sample(range(num_layers), rng.randint(0, num_layers))),
        "num_experts_per_tok": rng.randint(1, 3),
        # With 1, the cache of transformers 5.23 keeps all keys.
        "attention_chunk_size": rng.choice((2, 3, 7, 8, 13, 32, 300)),
        "attn_temperature_tuning": rng.random() < 0.7,
        "floor_scale": rng.choice((1, 3, 16, 40)),
        "attn_scale": rng.choice((0.1, 1.5)),
        "use_qk_norm": rng.random() < 0.5,
        "num_key_value_heads": rng.choice((1, 2, 4)),
    }
    if rng.random() < 0.3:
        # A folder may say for each layer whether it has chunks, whatever its positions are.
        settings["layer_types"] = [rng.choice(("full_attention", "chunked_attention")) for _ in range(num_layers)]
    return settings


@pytest.mark.parametrize("name", ["llama4"])
@pytest.mark.parametrize("seed", range(5))
def test_answers_are_those_of_generate(seed: int, name: str, tmp_path: pathlib.Path) -> None:
    rng = random.Random(seed)
    llama4.build_with(tmp_path, seed, text_settings(rng))
    family = families.build(FAMILIES[name], tmp_path, NUM_PROMPTS)
    model = family.offline.with_block_size(rng.choice((2, 8, 16)))
    check_in_all_ways(model, rng)
    _check_text(model, rng)


def _check_text(model: offline.OfflineModel, rng: random.Random) -> None:
    """A long prompt without images, whose answer is many chunks long."""
    ids = [rng.randint(20, 900) for _ in range(rng.randint(30, 150))]
    given = torch.tensor([ids])
    reference = tiny_models.load_model(model.runner.config.folder)
    with torch.inference_mode():
        output = reference.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False,
            max_new_tokens=NUM_ANSWER_TOKENS, min_new_tokens=NUM_ANSWER_TOKENS,
        )  # fmt: skip
    for budget in (2048, rng.randint(3, 40)):
        session = offline.Session(model, max_num_batched_tokens=budget, num_blocks=400)
        asked = session.ask([Prompt(tuple(ids))] * 2, max_tokens=NUM_ANSWER_TOKENS).token_ids
        assert asked == [output[0, len(ids) :].tolist()] * 2
