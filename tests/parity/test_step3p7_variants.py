"""Step 3.7 folders with query heads, bounds and layers of any kind, against `generate`."""

from __future__ import annotations

import math
import pathlib
import random
from typing import Any

import pytest

from decoder_svc.runner.cpu.native_experts import NativeExperts
from tests.parity import families, offline
from tests.parity.ways import check_in_all_ways
from tests.tiny_families import FAMILIES, step3p7

NUM_PROMPTS = 4


def text_settings(rng: random.Random) -> dict[str, Any]:
    """Draws the layers, and what they have in common."""
    num_layers = rng.randint(2, 5)

    def bounds() -> list[float | None] | None:
        return None if rng.random() < 0.2 else [rng.choice((None, 0.0, 0.1, 0.5, 2.0)) for _ in range(num_layers)]

    return {
        "num_hidden_layers": num_layers,
        "layer_types": [rng.choice(("full_attention", "sliding_attention")) for _ in range(num_layers)],
        "mlp_layer_types": [rng.choice(("dense", "sparse")) for _ in range(num_layers)],
        "swiglu_limits": bounds(),
        "swiglu_limits_shared": bounds(),
        "num_key_value_heads": 2,
        "num_attention_heads": rng.choice((2, 4, 8)),
        "num_sliding_attention_heads": rng.choice((2, 4, 6)),
        "sliding_window": rng.choice((2, 5, 16, 40)),
        "num_experts_per_tok": rng.randint(1, 4),
        "query_pre_attn_scalar": rng.choice((8, 16, 33)),
        "attention_bias": rng.random() < 0.5,
        "rope_parameters": {
            kind: {
                "rope_type": "default",
                "rope_theta": rng.choice((100.0, 10_000.0)),
                "partial_rotary_factor": rng.choice((0.5, 1.0)),
            }
            for kind in ("full_attention", "sliding_attention")
        },
    }


@pytest.mark.parametrize("name", ["step3p7"])
@pytest.mark.parametrize("seed", range(5))
def test_answers_are_those_of_generate(seed: int, name: str, tmp_path: pathlib.Path) -> None:
    rng = random.Random(seed)
    settings = text_settings(rng)
    step3p7.build_with(tmp_path, seed, settings)
    family = families.build(FAMILIES[name], tmp_path, NUM_PROMPTS)
    model = family.offline.with_block_size(rng.choice((2, 8, 16)))
    layers = model.runner.model.model.language_model.layers
    for layer, kind, is_unbounded in zip(layers, settings["mlp_layer_types"], _unbounded(settings), strict=True):
        if kind == "sparse":
            assert isinstance(layer.mlp.experts, NativeExperts) == is_unbounded
    check_in_all_ways(model, rng)


def _unbounded(settings: dict[str, Any]) -> list[bool]:
    return [not bound for bound in settings["swiglu_limits"] or [None] * settings["num_hidden_layers"]]


@pytest.mark.parametrize("name", ["step3p7"])
def test_bounds_change_answers(name: str, tmp_path: pathlib.Path) -> None:
    """Else the tests above would not feel them."""
    step3p7.build(tmp_path)
    family = families.build(FAMILIES[name], tmp_path, NUM_PROMPTS).offline
    prompts, expected = zip(*((one.prompt, one.expected) for one in family.questions), strict=True)
    for layer in family.runner.model.model.language_model.layers:
        for module in layer.modules():
            if hasattr(module, "limit"):
                module.limit = math.inf
    assert offline.Session(family).ask(list(prompts)).token_ids != list(expected)
