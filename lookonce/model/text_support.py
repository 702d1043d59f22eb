"""Decides from the configuration, before any weight is read, whether a text model can be served exactly.

The decoder flattens many requests into one row and replaces attention. A layer that keeps an unknown kind of state, or
whose results depend on the rest of the batch, would give other tokens than `generate`. A model with such a layer is
refused. Known kinds are keys and values, and the states of gated delta nets, short convolutions (docs/adr/0041) and
Mamba2 (docs/adr/0057).
`head_shape` and `key_sources` describe the keys and values of each layer.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lookonce.families.base import Mask

_LAYER_TYPES = ("full_attention", "sliding_attention")


class RecurrentKind(enum.Enum):
    """A kind of layers with a state instead of keys and values."""

    DELTA_NET = "gated delta net"
    SHORT_CONVOLUTION = "short convolution"
    MAMBA2 = "Mamba2"


# Kinds of recurrent layers by the text model and the type that it gives them.
_RECURRENT_KINDS = {
    ("qwen3_5_text", "linear_attention"): RecurrentKind.DELTA_NET,
    ("qwen3_5_moe_text", "linear_attention"): RecurrentKind.DELTA_NET,
    ("lfm2", "conv"): RecurrentKind.SHORT_CONVOLUTION,
    ("lfm3", "conv"): RecurrentKind.SHORT_CONVOLUTION,
    ("nemotron_h", "linear_attention"): RecurrentKind.MAMBA2,
}
# Types of layers that mix no tokens, so that they keep nothing, and the text models whose layers of that type are
# served.
_TOKENWISE_TYPES = {"mlp": frozenset({"nemotron_h"}), "moe": frozenset({"nemotron_h"})}
# Layers whose tokens see those of their own chunk of the sequence, and the types of layers of the text models that have
# such layers.
CHUNKED_TYPE = "chunked_attention"
_CHUNKED_LAYER_TYPES = {"llama4_text": ("full_attention", CHUNKED_TYPE)}
# Rope types whose rotary frequencies do not depend on the batch.
_ROPE_TYPES = frozenset({"default", "linear", "yarn", "llama3", "proportional"})
_BATCH_ROPE_TYPES = frozenset({"dynamic", "longrope"})
# Models with learned attention sinks. Listed by name, because most configurations do not mention them.
SINK_MODEL_TYPES = frozenset({
    "deepseek_v4", "flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash",
    "openai_privacy_filter",
})  # fmt: skip
# Text models in which a rope of type `dynamic` with a fixed `alpha` does not depend on the batch either.
_FIXED_ALPHA_MODEL_TYPES = frozenset({"hunyuan_vl_text"})
# Text models whose latent attention (MLA, arXiv:2405.04434) is served, in the form of structure/latent_attention.py.
_LATENT_MODEL_TYPES = frozenset({"deepseek_v3", "mistral4"})
# Its sizes.
_LATENT_FIELDS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Fields of rope_parameters by which Mistral 4 scales queries with their position.
_TEMPERATURE_FIELDS = ("llama_4_scaling_beta", "original_max_position_embeddings")
_ADVICE = "use a model with another text model"
_HEAD_FIELDS = ("num_attention_heads", "num_key_value_heads")
# Numbers of heads, each with that of the heads of keys that groups of them share.
_GROUPED_HEADS = {"num_attention_heads": "num_key_value_heads", "linear_num_value_heads": "linear_num_key_heads"}
# Text models whose layers may have two shapes of heads, share keys and values, and take per-layer inputs. Each belongs
# to one type of whole models, whose family knows which tokens layers look up.
_SHARING_MODEL_TYPES = {
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4_unified",
}
# Text models whose layers may have different numbers of query heads, and differ in nothing else.
_QUERY_HEADS_MODEL_TYPES = frozenset({"step3p5"})
_SHARING_FIELDS = frozenset({"hidden_size_per_layer_input", "num_kv_shared_layers"})
# Configuration fields of features that the decoder does not support, with their description.
_UNSERVED_FIELDS = {
    "cross_attention_layers": "layers that attend to the image apart from the text (cross-attention)",
    "add_cross_attention": "cross-attention",
    "hidden_size_per_layer_input": "embeddings that join every layer (per-layer inputs)",
    "num_kv_shared_layers": "layers that share their keys and values",
    "kv_lora_rank": "compressed keys and values (multi-head latent attention)",
}


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The keys, and the values, of one token in one layer."""

    num_kv_heads: int
    head_dim: int
    # Values are the first elements of keys, so many of them, and are not stored apart; None: they have the keys' shape.
    value_dim: int | None = None

    @property
    def num_elements(self) -> int:
        """Numbers that the cache keeps of a token."""
        return (1 if self.value_dim else 2) * self.num_kv_heads * self.head_dim


def recurrent_kinds(text: Any) -> dict[int, RecurrentKind]:
    """Returns the recurrent layers of a text configuration of transformers, and the kind of each."""
    types = getattr(text, "layer_types", None) or ()
    kinds = ((layer, _RECURRENT_KINDS.get((text.model_type, each))) for layer, each in enumerate(types))
    return {layer: kind for layer, kind in kinds if kind is not None}


def layers_without_keys(text: Any) -> frozenset[int]:
    """Returns the layers of a text configuration that have no attention, and with it no keys and values."""
    types = getattr(text, "layer_types", None) or ()
    tokenwise = (layer for layer, each in enumerate(types) if text.model_type in _TOKENWISE_TYPES.get(each, ()))
    return frozenset((*recurrent_kinds(text), *tokenwise))


def head_shape(text: Any, layer: int) -> HeadShape:
    """Returns the shape of a layer's keys and values, from a text configuration of transformers."""
    if is_latent(text):
        # The latent and the rotary key (latent_attention.py).
        return HeadShape(1, int(text.kv_lora_rank + text.qk_rope_head_dim), int(text.kv_lora_rank))
    own = text.per_layer_config[layer] if getattr(text, "is_heterogeneous", False) else text
    head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    return HeadShape(int(own.num_key_value_heads), int(head_dim))


def query_heads(text: Any) -> tuple[int, ...]:
    """Returns the numbers of query heads that layers of a text configuration have, ascending."""
    own = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    return tuple(sorted({int(layer.num_attention_heads) for layer in own}))


def is_latent(text: Any) -> bool:
    """Whether a text model's layers have latent attention that is served."""
    return text.model_type in _LATENT_MODEL_TYPES


def key_sources(text: Any) -> dict[int, int]:
    """Returns the layers without keys and values of their own, each with the earlier layer whose it reads.

    Such a layer reads those of the last layer of its type that has its own (Gemma 3n and 4).
    """
    num_shared = getattr(text, "num_kv_shared_layers", 0) or 0
    if not num_shared:
        return {}
    first = text.num_hidden_layers - num_shared
    last_of_type = {kind: layer for layer, kind in enumerate(text.layer_types[:first])}
    return {layer: last_of_type[text.layer_types[layer]] for layer in range(first, text.num_hidden_layers)}


def text_refusal(config: Any, mask: Mask) -> str | None:
    """Returns why a folder's text model cannot be served exactly and what to do, or None if it can.

    `config` is the folder's configuration as transformers reads it, `mask` its family's. Raises ValueError if the
    configuration has no text model.
    """
    text = config.get_text_config()
    sight = getattr(text, "use_bidirectional_attention", False)
    # "vision": within images alone, in layers with a window.
    if sight and mask is not Mask.PROMPT and not (mask is Mask.IMAGE and sight == "vision"):
        return (
            f"the text model ({text.model_type}) lets tokens see later tokens (bidirectional attention), "
            f"which is not served; {_ADVICE}"
        )
    checks = (
        *(_composition, _layer_shapes, _unserved_field, _layers, _rope, _heads, _latent, _groups_of_heads),
        *(_chunks, _temperature, _window),
    )
    for check in checks:
        reason: str | None = check(config, text)
        if reason is not None:
            return f"the text model ({text.model_type}) has {reason}"
    return None


def _may_share(config: Any, text: Any) -> bool:
    return text.model_type in _SHARING_MODEL_TYPES and config.model_type == _SHARING_MODEL_TYPES[text.model_type]


def _composition(config: Any, text: Any) -> str | None:
    for part in (config, text):
        if getattr(part, "is_encoder_decoder", False):
            return f"an encoder and a decoder ({part.model_type}: is_encoder_decoder), which is not served; {_ADVICE}"
    if text.model_type in SINK_MODEL_TYPES:
        return f"attention sinks, which are not served; {_ADVICE}"
    return None


def _layer_shapes(config: Any, text: Any) -> str | None:
    if not getattr(text, "is_heterogeneous", False):
        return None
    if text.model_type in _QUERY_HEADS_MODEL_TYPES:
        return _other_differences(text)
    if not _may_share(config, text):
        return f"layers of different shapes, but all layers share one KV cache shape; {_ADVICE}"
    shapes = {(kind, head_shape(text, layer)) for layer, kind in enumerate(text.layer_types)}
    if len(shapes) > len(set(text.layer_types)):
        return f"layers of one type with different numbers or sizes of heads, which are not served; {_ADVICE}"
    return None


def _other_differences(text: Any) -> str | None:
    """Returns the reason if layers differ in more than their number of query heads."""
    layers = [vars(text.per_layer_config[layer]) for layer in range(text.num_hidden_layers)]
    names = {name for layer in layers for name in layer if layer[name] != layers[0].get(name)}
    names |= {"skip"} if any(layer["skip"] for layer in layers) else set()
    if others := sorted(names - {"num_attention_heads"}):
        return f"layers that differ in {others[0]}, which is not served; {_ADVICE}"
    return None


def _unserved_field(config: Any, text: Any) -> str | None:
    for name, meaning in _UNSERVED_FIELDS.items():
        value = getattr(text, name, None)
        is_served = is_latent(text) if name == "kv_lora_rank" else name in _SHARING_FIELDS and _may_share(config, text)
        if value and not is_served:
            return f"{meaning}, which are not served ({name} is {value!r}); {_ADVICE}"
    return None


def _layers(_config: Any, text: Any) -> str | None:
    layer_types = getattr(text, "layer_types", None) or ()
    keyless = layers_without_keys(text)
    served_types = _CHUNKED_LAYER_TYPES.get(text.model_type, _LAYER_TYPES)
    for layer, layer_type in enumerate(layer_types):
        if layer not in keyless and layer_type not in served_types:
            served = " and ".join(served_types)
            return f"a layer of type {layer_type!r} (layer {layer}), but only {served} are served; {_ADVICE}"
    if layer_types and len(keyless) == len(layer_types):
        return f"no layer with attention, of which one is needed; {_ADVICE}"
    return None


def _rope(_config: Any, text: Any) -> str | None:
    parameters = getattr(text, "rope_parameters", None) or {}
    is_fixed = text.model_type in _FIXED_ALPHA_MODEL_TYPES and parameters.get("alpha")
    for where, rope_type in _rope_types(parameters):
        if is_fixed and rope_type == "dynamic":
            continue
        if rope_type in _BATCH_ROPE_TYPES:
            return (
                f"the rope type {rope_type!r}{where}, with which the longest request of a batch changes the answers of "
                f"other requests; {_ADVICE}"
            )
        if rope_type not in _ROPE_TYPES:
            served = ", ".join(sorted(_ROPE_TYPES))
            return f"the rope type {rope_type!r}{where}, but only {served} are served; {_ADVICE}"
    return None


def _rope_types(parameters: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns (text naming the layers, rope type) for each group of layers; layers without rope are not listed."""
    by_layer_type = {name: value for name, value in parameters.items() if isinstance(value, Mapping)}
    if by_layer_type:
        return [(f" in {name} layers", value.get("rope_type", "default")) for name, value in by_layer_type.items()]
    return [("", parameters.get("rope_type", "default"))]


def _heads(_config: Any, text: Any) -> str | None:
    own = text.per_layer_config[0] if getattr(text, "is_heterogeneous", False) else text
    for name in _HEAD_FIELDS:
        value = getattr(own, name, None)
        if value is None:
            return (
                f"no {name} in its configuration, which sizes the KV cache, so text models of type "
                f"{text.model_type!r} are not served; use a model with another text model, such as llama or qwen2"
            )
    return None


def _groups_of_heads(_config: Any, text: Any) -> str | None:
    own = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    for sizes in own.values() if isinstance(own, Mapping) else own:
        for name, of_keys in _GROUPED_HEADS.items():
            heads, key_heads = getattr(sizes, name, None), getattr(sizes, of_keys, None)
            # Kernels give each group of heads a head of keys, and would not compute the rest.
            if heads is not None and key_heads is not None and (key_heads < 1 or heads % key_heads):
                return (
                    f"{name} = {heads}, which {of_keys} = {key_heads} does not divide; use the config.json that "
                    "belongs to the weights"
                )
    return None


def _latent(_config: Any, text: Any) -> str | None:
    if not is_latent(text):
        return None
    for name in _LATENT_FIELDS:
        value = getattr(text, name, None)
        if not isinstance(value, int) or value < 1:
            return f"latent attention; {name} in config.json must be a number ≥ 1, not {value!r}"
    if text.num_key_value_heads != text.num_attention_heads:
        return (
            f"latent attention with num_key_value_heads = {text.num_key_value_heads}, which must be the number of "
            f"heads, {text.num_attention_heads}; use the config.json that belongs to the weights"
        )
    parameters = getattr(text, "rope_parameters", None) or {}
    for name in _TEMPERATURE_FIELDS if text.model_type == "mistral4" else ():
        value = parameters.get(name)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            return (
                "queries that are scaled with their position; "
                f"rope_parameters.{name} in config.json must be a number > 0, not {value!r}"
            )
    return None


def _chunks(_config: Any, text: Any) -> str | None:
    chunk = getattr(text, "attention_chunk_size", None)
    if CHUNKED_TYPE in (getattr(text, "layer_types", None) or ()) and (not isinstance(chunk, int) or chunk < 1):
        return f"layers with chunks; attention_chunk_size in config.json must be a number ≥ 1, not {chunk!r}"
    return None


def _temperature(_config: Any, text: Any) -> str | None:
    if not getattr(text, "attn_temperature_tuning", False):
        return None
    for name, least in (("floor_scale", 0), ("attn_scale", -math.inf)):
        value = getattr(text, name, None)
        if not isinstance(value, int | float) or not least < value < math.inf:
            bound = "a number > 0" if least == 0 else "a number"
            return f"queries that are scaled with their position; {name} in config.json must be {bound}, not {value!r}"
    return None


def _window(_config: Any, text: Any) -> str | None:
    window = getattr(text, "sliding_window", None)
    is_declared = getattr(text, "use_sliding_window", False) or "sliding_attention" in (
        getattr(text, "layer_types", None) or ()
    )
    if window is None and not is_declared:
        return None
    if not isinstance(window, int) or window < 1:
        return (
            "sliding-window layers without a valid window; "
            f"sliding_window in config.json must be a number ≥ 1, not {window!r}"
        )
    return None
