"""An exception of transformers becomes one line that names the module and the numbers of the failed statement."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextTopKRouter

from lookonce.model.build_faults import built_fault, in_one_line, step_fault


def test_the_module_and_its_numbers_are_named() -> None:
    router = Qwen3VLMoeTextTopKRouter(Qwen3VLMoeTextConfig(hidden_size=4, num_experts=8, num_experts_per_tok=9))
    with pytest.raises(RuntimeError) as caught:
        router(torch.zeros(2, 4))
    message = str(step_fault(caught.value))
    assert message.startswith("the language model cannot compute a step: RuntimeError ")
    assert message.endswith(
        " in Qwen3VLMoeTextTopKRouter with top_k = 9; use the config.json that belongs to the weights"
    )


def test_building_a_half_is_told_apart_from_a_step() -> None:
    message = str(built_fault("text", ValueError("no\n  such size")))
    assert message.startswith("the text half cannot be built from config.json: ValueError no such size; use the ")


def test_an_exception_from_elsewhere_has_no_module() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    message = str(step_fault(caught.value))
    assert message == (
        f"the language model cannot compute a step: {in_one_line(caught.value)}; use the config.json that belongs to "
        "the weights"
    )


def test_lines_are_joined() -> None:
    assert in_one_line(ValueError("one\n  two")) == "ValueError one two"
    assert in_one_line(KeyError()) == "KeyError"
