"""Chosen experts give the results of Llama 4's module, which computes all of them for each token."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from lookonce.model.kernels.quantized_experts import experts_of
from lookonce.model.kernels.quantized_weight import whole
from lookonce.model.structure.chosen_experts import choose_experts

HIDDEN_SIZE, MLP_SIZE, NUM_EXPERTS = 32, 48, 6


def mixture(num_chosen: int, dtype: torch.dtype) -> torch.nn.ModuleList:
    """Returns a list with one random mixture."""
    config = Llama4TextConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=MLP_SIZE,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=num_chosen,
    )
    module = Llama4TextMoe(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=torch.Generator().manual_seed(parameter.ndim))
    return torch.nn.ModuleList([module.to(dtype).requires_grad_(False)])


@pytest.mark.parametrize("num_chosen", [1, 2, NUM_EXPERTS])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_results_are_those_of_the_whole_mixture(num_chosen: int, dtype: torch.dtype, tolerance: float) -> None:
    plain = mixture(num_chosen, dtype)
    chosen = copy.deepcopy(plain)
    choose_experts(chosen)
    assert not isinstance(chosen[0], Llama4TextMoe)
    assert chosen.state_dict().keys() == plain.state_dict().keys()
    for shape in ((1, 1), (1, 37), (3, 5)):
        tokens = torch.randn(*shape, HIDDEN_SIZE, generator=torch.Generator().manual_seed(shape[1])).to(dtype)
        expected, expected_logits = plain[0](tokens)
        found, logits = chosen[0](tokens)
        assert torch.equal(logits, expected_logits)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_experts_that_were_not_chosen_are_not_read() -> None:
    modules = mixture(1, torch.float32)
    choose_experts(modules)
    tokens = torch.randn(4, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    expected, logits = modules[0](tokens)
    others = torch.ones(NUM_EXPERTS, dtype=torch.bool)
    others[logits.argmax(dim=1)] = False
    assert others.any()
    modules[0].experts.gate_up_proj[others] = torch.nan
    found, _ = modules[0](tokens)
    assert torch.equal(found, expected)


def test_our_kernels_know_the_experts() -> None:
    modules = mixture(1, torch.float32)
    plain = modules[0].experts
    assert experts_of(plain) is None
    choose_experts(modules)
    found = experts_of(modules[0].experts)
    assert found is not None
    assert (found.num_experts, found.hidden_size, found.mlp_size) == (NUM_EXPERTS, HIDDEN_SIZE, MLP_SIZE)
    (gate, up), down = found.read(3)
    assert torch.equal(torch.cat([whole(gate), whole(up)]).T, plain.gate_up_proj[3])
    assert torch.equal(whole(down).T, plain.down_proj[3])
