"""An exception of transformers becomes one line that names the module and the numbers of the failed statement."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral4Config,
    Mistral4Model,
    Qwen3VLMoeTextConfig,
)
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextTopKRouter

from lookonce.model.faults.build_faults import built_fault, in_one_line, step_fault


def test_the_module_and_its_numbers_are_named() -> None:
    router = Qwen3VLMoeTextTopKRouter(Qwen3VLMoeTextConfig(hidden_size=4, num_experts=8, num_experts_per_tok=9))
    with pytest.raises(RuntimeError) as caught:
        router(torch.zeros(2, 4))
    message = str(step_fault(caught.value))
    assert message.startswith("the language model cannot compute a step with config.json: RuntimeError ")
    assert message.endswith(
        " in Qwen3VLMoeTextTopKRouter with top_k = 9; use the config.json that belongs to the weights"
    )


def test_attributes_have_the_names_of_their_fields_and_parts() -> None:
    config = Gemma3Config(vision_config={"hidden_size": 65, "num_attention_heads": 4})
    with pytest.raises(ValueError, match="embed_dim") as caught, torch.device("meta"):
        Gemma3ForConditionalGeneration(config)
    message = str(built_fault("vision", caught.value))
    assert " in SiglipAttention with vision_config.hidden_size = 65, vision_config.num_attention_heads = 4; " in message


@pytest.mark.parametrize("value", [None, "wide"])
def test_what_stands_in_the_place_of_a_number_is_told(value: object) -> None:
    config = Gemma3Config(text_config={"num_hidden_layers": 6})
    config.text_config.rope_parameters["full_attention"]["rope_theta"] = value
    with pytest.raises(TypeError) as caught, torch.device("meta"):
        Gemma3ForConditionalGeneration(config)
    stated = f"text_config.rope_parameters.full_attention.rope_theta = {value or 'null'}"
    message = str(built_fault("text", caught.value))
    assert "in Gemma3RotaryEmbedding with " in message
    assert stated in message


def test_a_step_has_the_fields_of_a_module_inside() -> None:
    config = Mistral4Config(
        **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size"), 32),
        **dict.fromkeys(("num_hidden_layers", "num_experts_per_tok", "pad_token_id"), 1),
        n_routed_experts=8,
        n_group=3,
        first_k_dense_replace=0,
    )
    with torch.device("meta"), torch.inference_mode():
        model = Mistral4Model(config)
        with pytest.raises(RuntimeError) as caught:
            model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert " in Mistral4TopkRouter with n_group = 3, n_routed_experts = 8; use" in str(step_fault(caught.value))


def test_building_a_half_is_told_apart_from_a_step() -> None:
    message = str(built_fault("text", ValueError("no\n  such size")))
    assert message.startswith("the text half cannot be built from config.json: ValueError no such size; use the ")


def test_an_exception_from_elsewhere_has_no_module() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    message = str(step_fault(caught.value))
    assert message == (
        f"the language model cannot compute a step with config.json: {in_one_line(caught.value)}; use the config.json "
        "that belongs to the weights"
    )


def test_lines_are_joined() -> None:
    assert in_one_line(ValueError("one\n  two")) == "ValueError one two"
    assert in_one_line(KeyError()) == "KeyError"
