"""All layers of a Llama-like language model in one native call per step (native/stack.cpp).

A stack copies the weights of transformers' modules and replaces them. Class names and modules decide whether a model
is Llama-like; stack_check.py compares the results when a model is loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from decoder_svc.runner.adapters.adapter_table import AdapterTable
from decoder_svc.runner.attention import LayerOptions, current_step
from decoder_svc.runner.cpu.attention import DTYPE_NAMES, NativeBackend
from decoder_svc.runner.cpu.native_adapters import NativeAdapters
from decoder_svc.runner.cpu.native_structures import Stack, StackLayer, StackStep
from lookonce.model.kernels.load_progress import LoadProgress
from lookonce.model.kernels.native_linear import Linear, PackedWeights, packable, packed
from lookonce.model.kernels.quantized_weight import QuantizedLinear, Weight, concatenated, dtype_of, padded, weight_of

# Outputs of the MLP's first layer are interleaved in groups of this size: gates, then the values that they gate.
LANES = 16
# Classes of transformers whose layers consist of RMS norm, attention, RMS norm and gated MLP only.
_MODELS = {
    "LlamaModel",
    "MistralModel",
    "Qwen2Model",
    "Qwen2VLTextModel",
    "Qwen2_5OmniThinkerTextModel",
    "Qwen2_5_VLTextModel",
    "Qwen3Model",
    "Qwen3VLTextModel",
}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


class StackOutput(NamedTuple):
    """The fields of a language model's output that transformers' wrappers read. Unused ones are None."""

    # [1, T, hidden]
    last_hidden_state: Tensor
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer, copied."""

    input_norm: Tensor
    attended_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    query_key_value: PackedWeights
    attended: PackedWeights
    gate_up: PackedWeights
    down: PackedWeights

    def weights(self) -> tuple[PackedWeights, ...]:
        """Returns the weights of the linear layers, in the order in which a step reads them."""
        return (self.query_key_value, self.attended, self.gate_up, self.down)


def unstackable_reason(text_model: Any) -> str | None:
    """Returns why a language model's layers cannot become a stack, or None if they can."""
    config = text_model.config
    if type(text_model).__name__ not in _MODELS:
        return f"layers of {type(text_model).__name__} are not supported"
    if config.hidden_act not in ("silu", "swish"):
        return f"the activation is {config.hidden_act}, not silu"
    if config.hidden_size % LANES:
        return f"the hidden size is {config.hidden_size}, not a multiple of {LANES}"
    for layer in text_model.layers:
        linears = [getattr(layer.self_attn, name) for name in _PROJECTIONS] + [
            getattr(layer.mlp, name) for name in _MLP
        ]
        if not all(type(linear) in (torch.nn.Linear, QuantizedLinear) and packable(linear) for linear in linears):
            return "a layer has weights other than plain matrices"
    return None


class NativeStack(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Replaces transformers' language model; takes and returns the same."""

    # It reads embeddings, positions and feature levels, and nothing else that a model may give it.
    takes_embeddings_alone = True

    def __init__(
        self,
        text_model: Any,
        backend: NativeBackend,
        options: Sequence[LayerOptions],
        adapters: AdapterTable | None = None,
    ) -> None:
        """Copies the weights of `text_model`, which may be released afterwards. `options` has one entry per layer."""
        super().__init__()
        self.config = text_model.config
        self.embed_tokens = text_model.embed_tokens
        self.rotary_emb = text_model.rotary_emb
        self._backend = backend
        self._options = tuple(options)
        self._dtype = dtype_of(text_model.layers[0].self_attn.q_proj)
        self._layers = _layers(text_model.layers)
        self._last_norm = _norm(text_model.norm)
        self._num_heads = self._layers[0].attended.num_inputs // text_model.layers[0].self_attn.head_dim
        self._structs = (StackLayer * len(self._layers))(*(_struct(layer) for layer in self._layers))
        self._stack = Stack(
            layers=self._structs,
            last_norm=self._last_norm.data_ptr(),
            hidden_size=self.config.hidden_size,
            mlp_size=self._layers[0].down.num_inputs,
            norm_epsilon=text_model.norm.variance_epsilon,
        )
        self._function = backend.library.function(f"lookonce_stack_{DTYPE_NAMES[self._dtype]}")
        self._adapters = None
        if adapters is not None:
            sizes = [_linear_sizes(layer) for layer in text_model.layers]
            self._adapters = NativeAdapters(adapters, sizes, self._dtype)
            adapters.apply_to(self._adapters)
        # The pools whose addresses are in the layers' structures.
        self._pools: object = None
        # True: `forward` runs the last layer only.
        self._is_abridged = False
        # Profiling: int64 `[len(PHASES)]` to which each step adds nanoseconds per phase; None: no profiling.
        self.phase_ns: Tensor | None = None

    def weights(self) -> list[PackedWeights]:
        """Returns the weights of all linear layers, in the order in which a step reads them."""
        return [weights for layer in self._layers for weights in layer.weights()]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that every step reads."""
        return sum(weights.nbytes for weights in self.weights())

    @contextmanager
    def last_layer_only(self) -> Iterator[None]:
        """Makes `forward` run the last layer only, to measure memory.

        Layers reuse the same memory one after the other, and running all of them takes seconds.
        """
        self._is_abridged = True
        try:
            yield
        finally:
            self._is_abridged = False

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
    ) -> StackOutput:
        """Takes transformers' arguments: embeddings `[1, T, hidden]`, positions `[1, T]` or `[axes, 1, T]`.

        The step comes from `forward_context`.
        """
        hidden = inputs_embeds[0].to(torch.float32, copy=True).contiguous()
        cosines, sines = (part[0].contiguous() for part in self.rotary_emb(hidden[None], position_ids))
        output = torch.empty(hidden.shape, dtype=self._dtype)
        levels = deepstack_visual_embeds or ()
        for index, level in enumerate(levels):
            self._run(hidden, cosines, sines, None, index, index + 1)
            assert visual_pos_masks is not None, "levels need visual_pos_masks"
            hidden[visual_pos_masks[0]] += level.float()
        first = len(self._layers) - 1 if self._is_abridged else len(levels)
        self._run(hidden, cosines, sines, output, first, len(self._layers))
        return StackOutput(output[None])

    def _run(
        self, hidden: Tensor, cosines: Tensor, sines: Tensor, output: Tensor | None, first: int, stop: int
    ) -> None:
        backend, metadata = current_step()
        assert backend is self._backend, "a stack runs only with the backend that it was created with"
        if self._pools is not self._backend.pools:
            self._bind_pools()
        step = self._backend.step(metadata)
        io = StackStep(
            hidden=hidden.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            output=None if output is None else output.data_ptr(),
            rotary_dim=cosines.shape[-1],
            first_layer=first,
            stop_layer=stop,
            phase_ns=None if self.phase_ns is None else self.phase_ns.data_ptr(),
        )
        adapted = None if self._adapters is None else self._adapters.step(hidden.shape[0])
        if adapted is not None:
            io.adapters = ctypes.pointer(adapted[0])
        self._function(ctypes.byref(self._stack), ctypes.byref(step.struct), ctypes.byref(io))

    def _bind_pools(self) -> None:
        for index, (struct, options) in enumerate(zip(self._structs, self._options, strict=True)):
            struct.pools = self._backend.pools[index]
            struct.options = self._backend.options(index, options)
        self._stack.heads = self._backend.heads(0, self._num_heads)
        self._pools = self._backend.pools


def _layers(layers: Sequence[Any]) -> list[_Layer]:
    progress = LoadProgress("layers are copied into the kernels' layout", len(layers))
    found = []
    for layer in layers:
        found.append(_layer(layer))
        progress.add(sum(weights.nbytes for weights in found[-1].weights()))
    return found


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    # Pad to whole vectors with zero weights, which change no result.
    missing = -mlp.gate_proj.out_features % LANES
    gate_up = interleaved([padded(weight_of(linear), missing) for linear in (mlp.gate_proj, mlp.up_proj)])
    biases = [linear.bias for linear in (mlp.gate_proj, mlp.up_proj)]
    gate_up_bias = None
    if biases[0] is not None:
        wide_biases = torch.cat([F.pad(bias, (0, missing)) for bias in biases])
        gate_up_bias = wide_biases[interleaved_rows(len(wide_biases))]
    return _Layer(
        input_norm=_norm(layer.input_layernorm),
        attended_norm=_norm(layer.post_attention_layernorm),
        query_norm=None if query_norm is None else _norm(query_norm),
        key_norm=None if key_norm is None else _norm(key_norm),
        query_key_value=_merged([attention.q_proj, attention.k_proj, attention.v_proj]),
        attended=packed(weight_of(attention.o_proj), attention.o_proj.bias),
        gate_up=packed(gate_up, gate_up_bias),
        down=packed(padded(weight_of(mlp.down_proj), num_inputs=missing), mlp.down_proj.bias),
    )


def _linear_sizes(layer: Any) -> dict[str, tuple[int, int]]:
    """Returns inputs and outputs of a layer's linear layers by their names."""
    names = [*(f"self_attn.{name}" for name in _PROJECTIONS), *(f"mlp.{name}" for name in _MLP)]
    linears = {name: layer.get_submodule(name) for name in names}
    return {name: (linear.in_features, linear.out_features) for name, linear in linears.items()}


def _norm(module: Any) -> Tensor:
    # Always a copy: a float32 tensor would otherwise stay in the mapped weight file.
    return module.weight.to(torch.float32, copy=True).contiguous()


def interleaved(parts: Sequence[Weight]) -> Weight:
    """Interleaves the rows of two matrices in groups of 16."""
    whole = concatenated(parts)
    return whole[interleaved_rows(whole.shape[0])]


def interleaved_rows(num_rows: int) -> Tensor:
    """Returns the order of rows that takes 16 of the first half, then 16 of the second half, and so on."""
    return torch.arange(num_rows).unflatten(0, (2, -1, LANES)).transpose(0, 1).flatten()


def _merged(linears: Sequence[Any]) -> PackedWeights:
    biases = [linear.bias for linear in linears]
    bias = None
    if any(one is not None for one in biases):
        sizes = [linear.out_features for linear in linears]
        bias = torch.cat([torch.zeros(n) if one is None else one.float() for one, n in zip(biases, sizes, strict=True)])
    return packed(concatenated([weight_of(linear) for linear in linears]), bias)


def _struct(layer: _Layer) -> StackLayer:
    def pointer(norm: Tensor | None) -> int | None:
        return None if norm is None else norm.data_ptr()

    linears: list[Linear] = [
        weights.struct() for weights in (layer.query_key_value, layer.attended, layer.gate_up, layer.down)
    ]
    return StackLayer(
        pointer(layer.input_norm), pointer(layer.attended_norm), pointer(layer.query_norm), pointer(layer.key_norm),
        *linears,
    )  # fmt: skip
