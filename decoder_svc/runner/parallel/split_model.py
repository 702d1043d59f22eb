"""Splits a loaded language model over ranks by the plan that transformers has for its layers.

The weights of a folder are mapped into memory and not read before they are used, so a rank reads its own part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from decoder_svc.runner.parallel.rank_group import RankGroup
from decoder_svc.runner.parallel.split_layers import (
    GatheredColumns,
    SplitEmbedding,
    SplitHead,
    SplitRows,
    SummedExperts,
    column_part,
    packed_part,
    plain_part,
)
from lookonce.errors import ConfigurationError
from lookonce.model.half_model import detach_from_file, text_child
from lookonce.model.kernels.quantized_weight import QuantizedLinear
from lookonce.model.text_support import head_shape, is_latent, key_sources, query_heads

# For models for which transformers has no plan. Their layers have the usual names, or the plan does not apply.
_USUAL_PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
# Layers that the plan for this type of text models leaves out: other names, MLPs without gates, shared experts, and the
# gates of heads.
_ADDED_PLANS = {
    "lfm2": {
        "layers.*.self_attn.out_proj": "rowwise",
        "layers.*.feed_forward.w1": "colwise",
        "layers.*.feed_forward.w3": "colwise",
        "layers.*.feed_forward.w2": "rowwise",
    },
    "lfm3": {"layers.*.self_attn.g_proj": "colwise"},
    "nemotron_h": {
        f"layers.*.mixer{path}.{name}": style
        for path in ("", ".shared_experts")
        for name, style in (("up_proj", "colwise"), ("down_proj", "rowwise"))
    },
}
# Every rank has the whole of these: norms, and recurrent layers, whose states are not divided.
_WHOLE_STYLES = frozenset({"replicate", "replicated_with_grad_allreduce"})
# The table of embeddings is split by its place in the model.
_VOCABULARY_STYLE = "embedding_rowwise"
_WHOLE_MODULES = re.compile(r"\.linear_attn\.")
# The dimension in which the weights of all experts are divided, and whether two weights lie behind each other in it.
_EXPERT_STYLES = {
    "colwise": (-2, False),
    "rowwise": (-1, False),
    "packed_colwise": (-2, True),
    "packed_rowwise": (-1, True),
}


def split_model(model: Any, group: RankGroup) -> int:
    """Leaves this rank's part of a language half in it. Returns the number of KV heads of this rank.

    Raises ConfigurationError for a model that cannot be split over so many ranks.
    """
    text_model = getattr(model.model, text_child(model))
    text = model.config.get_text_config()
    num_kv_heads = kv_heads_of_rank(text, group.size)
    _split_layers(text_model, _plan(text), group)
    _split_vocabulary(model, group)
    detach_from_file(model)
    return num_kv_heads


def kv_heads_of_rank(text: Any, num_ranks: int) -> int:
    """Returns the number of KV heads of each rank, from a text configuration.

    Raises ConfigurationError if the heads cannot be divided among so many ranks.
    """
    shapes = {head_shape(text, layer) for layer in range(text.num_hidden_layers)}
    if len(shapes) > 1 or key_sources(text):
        raise _refusal("layers with different heads, or with keys and values of others, are not split yet")
    if any(getattr(text, "activation_sparsity_pattern", None) or ()):
        raise _refusal("activations that depend on all units of a layer are not split yet")
    if is_latent(text):
        # Only experts and MLPs are split: each rank has the attention of all heads, and all latents.
        return head_shape(text, 0).num_kv_heads
    num_kv_heads = int(text.num_key_value_heads)
    if not any(name.endswith((".k_proj", ".qkv_proj")) and style == "colwise" for name, style in _plan(text).items()):
        # Products are gathered before attention, or attention is whole.
        return num_kv_heads
    for name, numbers in {"num_attention_heads": query_heads(text), "num_key_value_heads": (num_kv_heads,)}.items():
        if wrong := [number for number in numbers if number % num_ranks]:
            raise _refusal(f"{name} is {wrong[0]}, which {num_ranks} does not divide")
    return num_kv_heads // num_ranks


def _plan(text: Any) -> Mapping[str, str]:
    found: Mapping[str, str] = getattr(text, "base_model_tp_plan", None) or _USUAL_PLAN
    return {**found, **_ADDED_PLANS.get(text.model_type, {})}


def _split_layers(text_model: Any, plan: Mapping[str, str], group: RankGroup) -> None:
    modules, parameters = dict(text_model.named_modules()), dict(text_model.named_parameters())
    num_split = 0
    for name, style in _expanded(plan, [*modules, *parameters]):
        if style in _WHOLE_STYLES or style == _VOCABULARY_STYLE or _WHOLE_MODULES.search(name):
            continue
        parent = modules[name.rpartition(".")[0]]
        child = name.rpartition(".")[2]
        if name in parameters:
            _split_experts(parent, child, style, group)
        elif style == "moe_tp_experts":
            setattr(parent, child, SummedExperts(modules[name], group))
        else:
            setattr(parent, child, _split_linear(name, modules[name], style, group))
        num_split += 1
    if not num_split:
        raise _refusal(f"it is not known how the layers of {type(text_model).__name__} are split")


def _expanded(plan: Mapping[str, str], names: list[str]) -> list[tuple[str, str]]:
    """Returns each of the names for which the plan has a style. Its `*` stands for the number of a layer."""
    found = ((name, plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))) for name in names)
    return [(name, style) for name, style in found if style is not None]


def _split_linear(name: str, module: Any, style: str, group: RankGroup) -> nn.Module:
    if not isinstance(module, nn.Linear | QuantizedLinear):
        raise _refusal(f"{name} is a {type(module).__name__}, not a linear layer")
    if style == "colwise":
        return column_part(module, group)
    if style in ("colwise_gather_output", "colwise_rep"):
        return GatheredColumns(module, group)
    if style in ("rowwise", "rowwise_split_input"):
        return SplitRows(module, group, takes_all=style == "rowwise_split_input")
    raise _refusal(f"the style {style} of {name} is not known")


def _split_experts(module: Any, name: str, style: str, group: RankGroup) -> None:
    if style not in _EXPERT_STYLES:
        raise _refusal(f"the style {style} of {name} is not known")
    dim, is_packed = _EXPERT_STYLES[style]
    part = (packed_part if is_packed else plain_part)(getattr(module, name), group, dim)
    setattr(module, name, nn.Parameter(part, requires_grad=False))


def _split_vocabulary(model: Any, group: RankGroup) -> None:
    table, head = model.get_input_embeddings(), model.lm_head
    is_tied = isinstance(head, nn.Linear) and head.weight is table.weight
    split_table, split_head = SplitEmbedding(table, group), SplitHead(head, group)
    if is_tied:
        assert isinstance(split_head.part, nn.Linear), "only whole weights are tied"
        split_head.part.weight = split_table.part.weight
    model.set_input_embeddings(split_table)
    model.lm_head = split_head


def _refusal(reason: str) -> ConfigurationError:
    return ConfigurationError(f"tensor_parallel_size: {reason}")
