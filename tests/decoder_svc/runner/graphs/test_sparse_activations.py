"""Activations whose limit is computed once are those of transformers' modules, bit by bit."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from decoder_svc.runner.graphs.sparse_activations import fix_sparse_activations


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_they_are_those_of_transformers(share: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.Gemma3nTextConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=1,
        num_kv_shared_layers=0,
        layer_types=["full_attention"],
        activation_sparsity_pattern=[share],
    )
    torch.manual_seed(3)
    module = Gemma3nTextMLP(config).to(dtype)
    hidden = torch.randn(1, 7, 64, dtype=dtype)
    with torch.inference_mode():
        wanted = module(hidden)
        fix_sparse_activations(module, dtype)
        monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("the host makes a number"))
        assert torch.equal(module(hidden), wanted)
        if share:
            units = module._gaussian_topk(module.gate_proj(hidden))
            assert abs((units == 0).float().mean() - share) < 0.05
