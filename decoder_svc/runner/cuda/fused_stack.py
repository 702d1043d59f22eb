"""All layers of a Llama-like language model with merged projections and few kernels between them.

A stack takes the weights of transformers' modules and replaces them. Class names and modules decide whether a model is
Llama-like; `fused_stack_check.py` compares the results when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from decoder_svc.runner.attention import LayerOptions, current_step
from decoder_svc.runner.cuda.paged_backend import PagedBackend
from decoder_svc.runner.cuda.quantized_layers import DeviceLinear, joined_biases, joined_linears
from decoder_svc.runner.cuda.triton_layers import HeadNorms, rotate_write
from decoder_svc.runner.paged_step import PagedStep
from lookonce.model.kernels.triton_rowwise import add_norm, gated

# Classes of transformers whose layers consist of RMS norm, attention, RMS norm and gated MLP only.
_MODELS = {
    "LlamaModel",
    "MistralModel",
    "Qwen2Model",
    "Qwen2VLTextModel",
    "Qwen2_5_VLTextModel",
    "Qwen3Model",
    "Qwen3VLTextModel",
}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def unfusable_reason(text_model: Any) -> str | None:
    """Returns why a language model's layers cannot become a stack, or None if they can."""
    config = text_model.config
    if type(text_model).__name__ not in _MODELS:
        return f"layers of {type(text_model).__name__} are not supported"
    if config.hidden_act not in ("silu", "swish"):
        return f"the activation is {config.hidden_act}, not silu"
    for layer in text_model.layers:
        linears = [getattr(layer.self_attn, name) for name in _PROJECTIONS] + [
            getattr(layer.mlp, name) for name in _MLP
        ]
        if not all(type(linear) in (torch.nn.Linear, DeviceLinear) for linear in linears):
            return "a layer has weights other than plain matrices"
        if not (_can_merge(linears[:3]) and _can_merge(linears[4:6])):
            return "layers that are merged are quantized in different ways"
        if layer.self_attn.head_dim % 2:
            return f"a head has {layer.self_attn.head_dim} elements, which is not even"
    return None


class FusedStack(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Replaces transformers' language model; takes and returns the same."""

    # It reads embeddings, positions and feature levels, and nothing else that a model may give it.
    takes_embeddings_alone = True

    # Feature levels are added without reading on the host which tokens have them.
    adds_levels_without_waiting = True

    def __init__(self, text_model: Any, backend: PagedBackend, options: Sequence[LayerOptions]) -> None:
        """Merges weights of `text_model`, which stays usable: its own weights become parts of the merged ones.

        `options` has one entry per layer.
        """
        super().__init__()
        self.config = text_model.config
        self.embed_tokens = text_model.embed_tokens
        self.rotary_emb = text_model.rotary_emb
        self.norm = text_model.norm
        self.layers = torch.nn.ModuleList(
            _FusedLayer(index, layer, each)
            for index, (layer, each) in enumerate(zip(text_model.layers, options, strict=True))
        )
        self._backend = backend

    def get_input_embeddings(self) -> Any:
        """Returns the token embedding table."""
        return self.embed_tokens

    def forward(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        visual_pos_masks: Tensor | None = None,
        deepstack_visual_embeds: Sequence[Tensor] | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Takes transformers' arguments: embeddings `[1, T, hidden]`, positions `[1, T]` or `[axes, 1, T]`.

        The step comes from `forward_context`.
        """
        hidden = inputs_embeds[0].contiguous()
        cosines, sines = self.rotary_emb(hidden[None], position_ids)
        angles = cosines.view(hidden.shape[0], -1), sines.view(hidden.shape[0], -1)
        backend, metadata = current_step()
        assert backend is self._backend, "a stack runs only with the backend that it was created with"
        assert metadata.paged is not None, "the metadata was built without `paged`, which a stack reads"
        levels = deepstack_visual_embeds or ()
        delta: Tensor | None = None
        for index, layer in enumerate(self.layers):
            hidden, delta = layer(hidden, delta, angles, self._backend, metadata.paged)
            if index < len(levels):
                assert visual_pos_masks is not None, "levels need visual_pos_masks"
                hidden, delta = _with_level(hidden + delta, visual_pos_masks[0], levels[index]), None
        _, normed = add_norm(hidden, delta, self.norm.weight, self.norm.variance_epsilon)
        return BaseModelOutputWithPast(last_hidden_state=normed[None])


def _with_level(hidden: Tensor, has_row: Tensor, level: Tensor) -> Tensor:
    """Adds the rows of a feature level to the tokens that have one. The host does not wait for their number."""
    rows = (has_row.cumsum(0) - 1).clamp(min=0)
    return torch.where(has_row[:, None], hidden + level.index_select(0, rows), hidden)


class _FusedLayer(torch.nn.Module):  # type: ignore[misc]
    """One layer; takes and returns the hidden states in two parts that are still to be added."""

    def __init__(self, index: int, layer: Any, options: LayerOptions) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm, self.attended_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.query_key_value = _merged([attention.q_proj, attention.k_proj, attention.v_proj])
        self.attended = attention.o_proj
        self.gate_up = _merged([mlp.gate_proj, mlp.up_proj])
        self.down = mlp.down_proj
        self.query_norm: Any = getattr(attention, "q_norm", None)
        self.key_norm: Any = getattr(attention, "k_norm", None)
        self._index = index
        self._options = options

    def forward(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        angles: tuple[Tensor, Tensor],
        backend: PagedBackend,
        step: PagedStep,
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer on `hidden + delta`, `[num_tokens, hidden_size]`."""
        hidden, normed = add_norm(hidden, delta, self.input_norm.weight, self.input_norm.variance_epsilon)
        norms = None
        if self.query_norm is not None:
            norms = HeadNorms(self.query_norm.weight, self.key_norm.weight, self.query_norm.variance_epsilon)
        group = backend.blocks_of(self._index, step, self._options)
        pools = backend.pools_of(self._index)
        query = rotate_write(self.query_key_value(normed), angles, group.slot_mapping, pools, norms)
        attended = backend.attend_paged(self._index, query, group, step, self._options)
        delta = self.attended(attended.flatten(1))
        hidden, normed = add_norm(hidden, delta, self.attended_norm.weight, self.attended_norm.variance_epsilon)
        return hidden, self.down(gated(self.gate_up(normed)))


def _can_merge(linears: Sequence[Any]) -> bool:
    """Whether all weights are whole, or all are codes of one kind."""
    codes = [linear.weight_codes.kind for linear in linears if isinstance(linear, DeviceLinear)]
    return not codes or (len(codes) == len(linears) and len(set(codes)) == 1)


def _merged(linears: Sequence[Any]) -> torch.nn.Module:
    """Returns one layer with the outputs of all. Their weights become views of its weights, so memory is kept once."""
    if isinstance(linears[0], DeviceLinear):
        return joined_linears(linears)
    sizes = [linear.out_features for linear in linears]
    merged = torch.nn.Linear(linears[0].in_features, sum(sizes), bias=False, device="meta")
    merged.weight = _parameter(torch.cat([linear.weight for linear in linears]))
    for linear, weight in zip(linears, merged.weight.split(sizes), strict=True):
        linear.weight = _parameter(weight)
    bias = joined_biases(linears, merged.weight.device, merged.weight.dtype)
    if bias is not None:
        merged.bias = _parameter(bias)
    return merged


def _parameter(values: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values.detach(), requires_grad=False)
