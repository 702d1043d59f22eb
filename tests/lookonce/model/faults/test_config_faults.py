"""The fields of a config.json that contradict each other are found by leaving each out."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from lookonce.model.faults.config_faults import involved_fields, refusal_text

TEXT = transformers.Gemma3TextConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2).to_dict()


def gemma3(**changed: Any) -> dict[str, Any]:
    return {"model_type": "gemma3", "text_config": TEXT | changed, "vision_config": {"hidden_size": 65}}


def refused(config: dict[str, Any]) -> Exception:
    with pytest.raises(Exception, match=r"\w") as caught:
        transformers.Gemma3Config.from_dict(config)
    return caught.value


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"num_attention_heads": 5}, {"hidden_size = 64", "num_attention_heads = 5"}),
        ({"hidden_size": 65}, {"hidden_size = 65", "num_attention_heads = 4"}),
        ({"num_hidden_layers": 3}, {"num_hidden_layers = 3", f"layer_types = {TEXT['layer_types']}"[:74]}),
        ({"hidden_size": "wide"}, {"hidden_size = wide"}),
    ],
)
def test_both_sides_of_a_contradiction_are_found(changed: dict[str, Any], expected: set[str]) -> None:
    config = gemma3(**changed)
    found = involved_fields(config)
    for field in expected:
        assert f"text_config.{field}" in found
    assert found.count("text_config.") == len(expected)
    assert "vision_config" not in found
    text = refusal_text(config, refused(config))
    assert f"; these fields take part in it: {found}; use the config.json that belongs to the weights" in text
    assert "\n" not in text


def test_nothing_is_found_where_nothing_is_refused() -> None:
    assert involved_fields(gemma3()) == ""
    assert refusal_text(gemma3(), ValueError("no")) == (
        "ValueError no; use the config.json that belongs to the weights"
    )
