"""The absorbed form of latent attention gives what transformers' modules give, and its faults change that."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from decoder_svc.runner.adapters.low_rank import TextLinears, read_low_ranks
from decoder_svc.runner.attention import PAGED_ATTENTION, SdpaBackend, forward_context, register_paged_attention
from decoder_svc.runner.cpu.attention import HostSdpaBackend
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from lookonce.errors import ConfigurationError, ModelFolderError
from lookonce.model.adapter_folder import AdapterFolder
from lookonce.model.half_model import load_text_half
from lookonce.model.structure.latent_attention import LatentProjection, absorb_latents, latent_projection
from tests.decoder_svc.runner.attention_reference import Chunk
from tests.decoder_svc.runner.attention_step import LAYER, Sizes, Step
from tests.decoder_svc.runner.cpu.loaded_runner import load
from tests.lora_folders import lora_folder
from tests.tiny_families import FAMILIES

NUM_TOKENS, HEADS, ROTARY = 9, 3, 4
KEY_DIM, VALUE_DIM, RANK = 6, 5, 8


def _attention_module() -> Any:
    """Returns an attention module with random weights in float64, as a layer that the trial's step calls."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    config = transformers.DeepseekV3Config(
        hidden_size=12,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        kv_lora_rank=RANK,
        q_lora_rank=None,
        qk_nope_head_dim=KEY_DIM,
        qk_rope_head_dim=ROTARY,
        v_head_dim=VALUE_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    module = DeepseekV3Attention(config, LAYER).double().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module.requires_grad_(False)


def _run(module: Any, implementation: str) -> torch.Tensor:
    module.config._attn_implementation = implementation
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, NUM_TOKENS, 12, generator=generator, dtype=torch.float64)
    angles = torch.rand(1, NUM_TOKENS, ROTARY, generator=generator, dtype=torch.float64)
    mask = torch.full((NUM_TOKENS, NUM_TOKENS), -torch.inf, dtype=torch.float64).triu(1)
    output: torch.Tensor = module(hidden, position_embeddings=(angles.cos(), angles.sin()), attention_mask=mask)[0]
    return output


def _paged(module: Any) -> torch.Tensor:
    register_paged_attention()
    step = Step([Chunk(NUM_TOKENS, 0, 0, NUM_TOKENS)], Sizes(4, 1, HEADS, RANK + ROTARY, RANK), 0)
    with forward_context(step.backend, step.metadata(is_mutual_beyond_window=False)):
        return _run(module, PAGED_ATTENTION)


def test_the_absorbed_form_is_the_modules_form() -> None:
    wanted, module = _run(_attention_module(), "sdpa"), _attention_module()
    assert absorb_latents(torch.nn.ModuleList([module])) == 1
    torch.testing.assert_close(_paged(module), wanted, rtol=1e-12, atol=1e-12)


def _heads_of_keys_are_exchanged(projection: LatentProjection) -> None:
    projection.key_half.copy_(projection.key_half.view(HEADS, -1, RANK).flip(0).flatten(0, 1))


def _heads_of_values_are_exchanged(projection: LatentProjection) -> None:
    projection.value_half.copy_(projection.value_half.view(HEADS, RANK, -1).flip(0).flatten(0, 1))


def _latents_are_turned(projection: LatentProjection) -> None:
    projection.value_half.copy_(projection.value_half.view(HEADS, RANK, -1).flip(1).flatten(0, 1))


@pytest.mark.parametrize("fault", [_heads_of_keys_are_exchanged, _heads_of_values_are_exchanged, _latents_are_turned])
def test_faults_are_noticed(fault: Callable[[LatentProjection], None]) -> None:
    wanted, module = _run(_attention_module(), "sdpa"), _attention_module()
    absorb_latents(torch.nn.ModuleList([module]))
    fault(module.kv_b_proj)
    assert not torch.allclose(_paged(module), wanted, rtol=1e-3)


def test_values_that_are_parts_of_keys_have_no_pool() -> None:
    spec = KVCacheSpec(2, 1, 48, torch.float32, 4, value_dim=32)
    for backend in (SdpaBackend(), HostSdpaBackend()):
        pools = backend.allocate(spec, 3, 1, torch.device("cpu"))
        assert all(keys is values for keys, values in pools)
        assert sum(keys.nbytes for keys, _ in pools) == 3 * spec.block_bytes == 3 * 2 * 4 * 48 * 4
    apart = dataclasses.replace(spec, value_dim=None)
    assert apart.block_bytes == 2 * spec.block_bytes


@pytest.mark.parametrize("name", ["mistral4"])
def test_the_form_depends_on_the_attention_function(name: str, tmp_path: pathlib.Path) -> None:
    FAMILIES[name].build(tmp_path)
    for attention, is_absorbed in (("sdpa", False), ("eager", False), (PAGED_ATTENTION, True)):
        half = load_text_half(tmp_path, torch.float32, attention)
        layers = [layer.self_attn for layer in half.model.language_model.layers]
        assert {latent_projection(layer) is not None for layer in layers} == {is_absorbed}


@pytest.mark.parametrize("name", ["mistral4"])
def test_what_is_not_offered_is_refused_by_name(name: str, tmp_path: pathlib.Path) -> None:
    path = FAMILIES[name].build(tmp_path / "model")
    runner = load(path, torch.float32)
    with pytest.raises(ConfigurationError, match="kv_cache_dtype int8 is not offered for latent attention"):
        type(runner)(dataclasses.replace(runner.config, rounds_kv_cache=True), runner.family)
    linears = TextLinears(load_text_half(path, torch.float32, PAGED_ATTENTION))
    assert read_low_ranks(AdapterFolder.open("one", lora_folder(tmp_path / "one", path)), linears)
    of_latents = lora_folder(tmp_path / "two", path, target_modules=r".*language_model.*\.(kv_b_proj|o_proj)")
    with pytest.raises(ModelFolderError, match=r"kv_b_proj, whose halves are applied to queries and to results"):
        read_low_ranks(AdapterFolder.open("two", of_latents), linears)
