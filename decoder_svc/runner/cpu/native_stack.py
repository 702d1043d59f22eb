"""A Llama-like language model in one native call per step (native/stack.cpp): all layers, embeddings and head.

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
from decoder_svc.runner.cpu.native_step import are_below
from decoder_svc.runner.cpu.native_structures import Embeddings, Stack, StackLayer, StackStep
from decoder_svc.runner.cpu.rotary_table import RotaryTable, rotary_angles
from lookonce.model.kernels.load_progress import LoadProgress
from lookonce.model.kernels.native_linear import Linear, PackedWeights, packable, packed
from lookonce.model.kernels.packed_embedding import PackedEmbedding
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


class _Angles(NamedTuple):
    """Cosines and sines, float32 `[num_rows, rotary_dim]`, and each token's row, int64 `[num_tokens]`."""

    cosines: Tensor
    sines: Tensor
    # None: the rows are in the tokens' order.
    rows: Tensor | None


class _Results(NamedTuple):
    """Tensors that a call of the stack fills."""

    # The last norm, in the weights' type, [num_tokens, hidden_size]; None: it is not wanted.
    hidden: Tensor | None = None
    # The head's output, float32 [num_sampled, vocabulary]; None: it is not wanted.
    logits: Tensor | None = None
    # The tokens whose logits are computed, int64 [num_sampled]; None: all tokens.
    sampled: Tensor | None = None


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
        num_position_axes: int,
        adapters: AdapterTable | None = None,
    ) -> None:
        """Copies the weights of `text_model`, which may be released afterwards. `options` has one entry per layer."""
        super().__init__()
        self.config = text_model.config
        self.embed_tokens = text_model.embed_tokens
        self.rotary_emb = text_model.rotary_emb
        self._rotary_table = RotaryTable.of(
            text_model.rotary_emb, num_position_axes, self.config.max_position_embeddings
        )
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
        # The output head; None: `logits` cannot be called.
        self._head: Linear | None = None
        # The table of embeddings; None: `logits` takes embeddings only.
        self._embeddings: Embeddings | None = None
        # The weights that both point to.
        self._held: tuple[object, ...] = ()
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

    def take_head(self, head: PackedWeights, table: Any) -> None:
        """Lets `logits` compute the output head, and look tokens up in their table if it is a plain one."""
        self._head, weight = head.struct(), table.weight.data
        self._held = (head, weight)
        if isinstance(table, PackedEmbedding):
            self._embeddings = Embeddings(tied=ctypes.pointer(self._head), num_embeddings=table.num_embeddings)
        elif type(table) is torch.nn.Embedding and weight.dtype is self._dtype and weight.is_contiguous():
            self._embeddings = Embeddings(rows=weight.data_ptr(), num_embeddings=len(weight))

    @property
    def has_head(self) -> bool:
        """Whether `logits` can be called."""
        return self._head is not None

    @property
    def looks_tokens_up(self) -> bool:
        """Whether `logits` takes ids of tokens."""
        return self._embeddings is not None

    def logits(
        self,
        positions: Tensor,
        sampled: Tensor | None,
        *,
        embeddings: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """Returns what the head gives for the output of `forward`, float32 `[num_sampled, vocabulary]`, bit for bit.

        The tokens come as `embeddings` `[num_tokens, hidden_size]` or as int64 `token_ids` `[num_tokens]`; ids outside
        the table get its last embedding. `positions` are int64 `[axes, num_tokens]`, `sampled` int64 `[num_sampled]`
        (None: all tokens). The step comes from `forward_context`. Raises IndexError for a sampled index of no token.
        """
        assert self._head is not None, "take_head was not called"
        num_tokens = positions.shape[1]
        if sampled is not None and not are_below(sampled.numpy(), num_tokens):
            raise IndexError(f"sampled indexes {sampled.tolist()} are outside of {num_tokens} tokens")
        num_sampled = num_tokens if sampled is None else len(sampled)
        logits = torch.empty(num_sampled, self._head.num_outputs)
        hidden = None if embeddings is None else embeddings.to(torch.float32, copy=True).contiguous()
        first = len(self._layers) - 1 if self._is_abridged else 0
        results = _Results(logits=logits, sampled=sampled)
        self._run(hidden, token_ids, self._angles(positions), results, first, len(self._layers))
        return logits

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
        angles = self._angles(position_ids if position_ids.ndim == 2 else position_ids[:, 0])
        output = torch.empty(hidden.shape, dtype=self._dtype)
        levels = deepstack_visual_embeds or ()
        for index, level in enumerate(levels):
            self._run(hidden, None, angles, _Results(), index, index + 1)
            assert visual_pos_masks is not None, "levels need visual_pos_masks"
            hidden[visual_pos_masks[0]] += level.float()
        first = len(self._layers) - 1 if self._is_abridged else len(levels)
        self._run(hidden, None, angles, _Results(hidden=output), first, len(self._layers))
        return StackOutput(output[None])

    def _angles(self, positions: Tensor) -> _Angles:
        """Returns the angles of tokens at these positions, `[axes, num_tokens]`."""
        table = self._rotary_table
        if table is not None and table.covers(positions):
            return _Angles(table.cosines, table.sines, positions[0])
        found = rotary_angles(self.rotary_emb, positions if len(positions) == 1 else positions[:, None])
        return _Angles(*found, None)

    def _run(
        self,
        hidden: Tensor | None,
        token_ids: Tensor | None,
        angles: _Angles,
        results: _Results,
        first: int,
        stop: int,
    ) -> None:
        """Computes layers [first, stop) of tokens that come as `hidden`, which changes, or as `token_ids`."""
        backend, metadata = current_step()
        assert backend is self._backend, "a stack runs only with the backend that it was created with"
        if self._pools is not self._backend.pools:
            self._bind_pools()
        step = self._backend.step(metadata)
        io = StackStep(
            cosines=angles.cosines.data_ptr(),
            sines=angles.sines.data_ptr(),
            rotary_dim=angles.cosines.shape[1],
            first_layer=first,
            stop_layer=stop,
        )
        if hidden is not None:
            io.hidden = hidden.data_ptr()
        else:
            assert token_ids is not None, "tokens are hidden states or ids"
            assert self._embeddings is not None, "there is no table of embeddings"
            io.token_ids, io.embeddings = token_ids.data_ptr(), ctypes.pointer(self._embeddings)
        if angles.rows is not None:
            io.angle_rows = angles.rows.data_ptr()
        if results.hidden is not None:
            io.output = results.hidden.data_ptr()
        if results.logits is not None:
            assert self._head is not None, "there is no head"
            io.head, io.logits = ctypes.pointer(self._head), results.logits.data_ptr()
            io.num_sampled = len(results.logits)
            io.sampled = None if results.sampled is None else results.sampled.data_ptr()
        if self.phase_ns is not None:
            io.phase_ns = self.phase_ns.data_ptr()
        adapted = None if self._adapters is None else self._adapters.step(step.struct.num_tokens)
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
