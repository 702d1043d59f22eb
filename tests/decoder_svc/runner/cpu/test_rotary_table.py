"""Angles of a table are those of transformers' modules, and only tokens of texts take them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2VLConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

from decoder_svc.runner.cpu.rotary_table import RotaryTable, rotary_angles

NUM_POSITIONS = 5000
# The last of the first positions that are computed, the first behind them, and so on.
PLACES = (0, 1, 17, 1023, 1024, 2500, NUM_POSITIONS - 1)
LONG = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1250}
FIXED = {
    "default": {"rope_theta": 1e4},
    "linear": {"rope_theta": 1e4, "factor": 4.0},
    "yarn": LONG,
    "llama3": {**LONG, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": NUM_POSITIONS}


def plain(kind: str, parameters: dict[str, Any]) -> Any:
    return LlamaRotaryEmbedding(LlamaConfig(**SIZES, rope_parameters={"rope_type": kind, **parameters}))


def with_axes() -> Any:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    return Qwen2VLRotaryEmbedding(Qwen2VLConfig(text_config={**SIZES, "rope_parameters": parameters}).text_config)


def agrees(table: RotaryTable, rotary: Any, positions: torch.Tensor) -> bool:
    if not table.covers(positions):
        return False
    wanted = rotary_angles(rotary, positions if len(positions) == 1 else positions[:, None])
    found = (table.cosines[positions[0]], table.sines[positions[0]])
    return all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("kind", FIXED)
def test_angles_are_those_of_the_module(kind: str) -> None:
    rotary = plain(kind, FIXED[kind])
    table = RotaryTable.of(rotary, 1, NUM_POSITIONS)
    assert table is not None
    for place in PLACES:
        assert agrees(table, rotary, torch.tensor([[place]]))
    assert agrees(table, rotary, torch.tensor([PLACES]))
    assert agrees(table, rotary, torch.arange(NUM_POSITIONS)[None])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_depend_on_the_length_are_not_kept(kind: str) -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16} if kind == "longrope" else {}
    assert RotaryTable.of(plain(kind, {**LONG, **factors}), 1, NUM_POSITIONS) is None


def test_a_module_whose_angles_change_gets_no_table() -> None:
    rotary = plain("default", FIXED["default"])
    forward, num_calls = rotary.forward, 0

    def changing(inputs: torch.Tensor, positions: torch.Tensor) -> Any:
        nonlocal num_calls
        num_calls += 1
        return [part * num_calls for part in forward(inputs, positions)]

    rotary.forward = changing
    assert RotaryTable.of(rotary, 1, NUM_POSITIONS) is None


def test_tokens_with_one_position_on_all_axes_are_covered_and_others_are_not() -> None:
    rotary = with_axes()
    table = RotaryTable.of(rotary, 3, NUM_POSITIONS)
    assert table is not None
    positions = torch.tensor([PLACES]).expand(3, -1)
    assert agrees(table, rotary, positions)
    assert not table.covers(positions + torch.tensor([[0], [0], [1]]))
    assert not table.covers(torch.cat([positions, torch.tensor([[4], [4], [5]])], dim=1))


def test_a_table_of_very_many_positions_is_bounded() -> None:
    """A model may name any number of them."""
    table = RotaryTable.of(plain("default", FIXED["default"]), 1, 1 << 60)
    assert table is not None
    assert len(table.cosines) < 1 << 20
    assert not table.covers(torch.tensor([[1 << 59]]))


@pytest.mark.parametrize("position", [-1, NUM_POSITIONS])
def test_positions_outside_of_the_table_are_not_covered(position: int) -> None:
    table = RotaryTable.of(plain("default", FIXED["default"]), 1, NUM_POSITIONS)
    assert table is not None
    assert not table.covers(torch.tensor([[3, position, 4]]))
