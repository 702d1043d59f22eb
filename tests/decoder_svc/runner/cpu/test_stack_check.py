"""The comparison of a stack with its reference: a fixed trial, the options of each layer, and NaN that never passes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoder_svc.runner.attention import AttentionBackend, LayerOptions, SdpaBackend, current_step
from decoder_svc.runner.cpu.stack_check import (
    RecordingBackend,
    random_trial,
    recorded_options,
    relative_difference,
)
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from decoder_svc.scheduling.window import Window

HIDDEN_SIZE = 8
OPTIONS = (LayerOptions(0.5), LayerOptions(0.25, Window(4), 3.0))
SPEC = KVCacheSpec(2, 1, HIDDEN_SIZE, torch.float32, 4)


@dataclass
class Output:
    last_hidden_state: Tensor


class TwoLayers:
    """A model of two attention layers, whose queries, keys and values are its hidden states."""

    def __init__(self) -> None:
        self.positions: list[Tensor] = []

    def __call__(self, inputs_embeds: Tensor, position_ids: Tensor, **_: Any) -> Output:
        self.positions.append(position_ids)
        backend, metadata = current_step()
        hidden = inputs_embeds[0][:, None]
        for layer, options in enumerate(OPTIONS):
            hidden = hidden + backend.forward(layer, hidden, hidden, hidden, metadata, options)
        return Output(hidden.transpose(0, 1))


def states(backend: AttentionBackend) -> Tensor:
    return random_trial(HIDDEN_SIZE, 1, SPEC).run(TwoLayers(), backend)


def test_a_trial_gives_the_same_states_every_time() -> None:
    one, other = states(SdpaBackend()), states(RecordingBackend())
    assert one.shape == (21, HIDDEN_SIZE)
    assert torch.equal(one, other)


def test_a_prompt_and_single_tokens_are_tried_with_different_positions_on_each_axis() -> None:
    model = TwoLayers()
    random_trial(HIDDEN_SIZE, 3, SPEC).run(model, SdpaBackend())
    assert [positions.shape for positions in model.positions] == [(3, 1, 18), *[(3, 1, 1)] * 3]
    assert model.positions[-1].flatten().tolist() == [20, 40, 60]


def test_the_reference_records_the_options_of_each_layer_in_order() -> None:
    backend = RecordingBackend()
    states(backend)
    assert tuple(recorded_options(backend)) == OPTIONS


def test_the_difference_is_relative_to_the_largest_wanted_value() -> None:
    wanted = torch.tensor([[1.0, -4.0]])
    assert relative_difference(wanted + torch.tensor([[0.0, 1.0]]), wanted) == 0.25
    assert math.isnan(relative_difference(torch.tensor([[1.0, math.nan]]), wanted))
