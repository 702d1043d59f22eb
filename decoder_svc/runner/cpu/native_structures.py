"""Declares the C++ structures of the decoder's kernels (native/) for ctypes: the same fields."""

from __future__ import annotations

import ctypes

from decoder_svc.runner.state_step import StateStep
from lookonce.model.kernels.native_linear import Linear

# Phases of a stack whose time is measured separately (enum Phase in native/stack.cpp).
PHASES = (
    "embeddings", "norms", "query_key_value", "rotation", "attention", "attended", "gate_up", "down", "head",
)  # fmt: skip

_POINTER, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class NativeStateStep(ctypes.Structure):
    """The arrays of a step's states: StateStep in native/state_step.h."""

    _fields_ = (
        ("sources", _POINTER),
        ("targets", _POINTER),
        ("first_tokens", _POINTER),
        ("first_snapshots", _POINTER),
        ("snapshot_tokens", _POINTER),
        ("snapshot_states", _POINTER),
        ("num_sequences", _INTEGER),
    )

    @classmethod
    def of(cls, step: StateStep) -> NativeStateStep:
        """Returns pointers to the arrays of a step, which must stay."""
        return cls(
            sources=step.sources.data_ptr(),
            targets=step.targets.data_ptr(),
            first_tokens=step.first_tokens.data_ptr(),
            first_snapshots=step.first_snapshots.data_ptr(),
            snapshot_tokens=step.snapshot_tokens.data_ptr(),
            snapshot_states=step.snapshot_states.data_ptr(),
            num_sequences=len(step.targets),
        )


class BlockGroup(ctypes.Structure):
    """Positions of a step's tokens in the pools of one group of layers."""

    _fields_ = (
        ("slots", _POINTER),
        ("blocks", _POINTER),
        ("first_blocks", _POINTER),
        ("first_keys", _POINTER),
    )


class Step(ctypes.Structure):
    """The tokens and sequences of one step."""

    _fields_ = (
        ("first_tokens", _POINTER),
        ("num_keys", _POINTER),
        ("span_starts", _POINTER),
        ("span_stops", _POINTER),
        ("groups", BlockGroup * 2),
        ("num_sequences", _INTEGER),
        ("num_tokens", _INTEGER),
        ("is_mutual_beyond_window", _INTEGER),
        ("num_threads", _INTEGER),
    )


class Heads(ctypes.Structure):
    """Attention shapes of the layers of a group."""

    _fields_ = (
        ("num_heads", _INTEGER),
        ("num_kv_heads", _INTEGER),
        ("head_dim", _INTEGER),
        ("block_size", _INTEGER),
        ("block_slots", _INTEGER),
        ("is_rounded", _INTEGER),
        ("value_dim", _INTEGER),
    )


class Pools(ctypes.Structure):
    """Addresses of one layer's key and value pools."""

    _fields_ = (("keys", _POINTER), ("values", _POINTER))


class Options(ctypes.Structure):
    """Parameters of one layer's attention; LayerOptions in C++."""

    _fields_ = (
        ("group", _INTEGER),
        ("window", _INTEGER),
        ("scale", _FLOAT),
        ("softcap", _FLOAT),
        ("is_causal", _INTEGER),
        ("is_chunked", _INTEGER),
    )


class StackLayer(ctypes.Structure):
    """One layer of a stack: norms, linear layers, pools and attention options."""

    _fields_ = (
        ("input_norm", _POINTER),
        ("attended_norm", _POINTER),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("query_key_value", Linear),
        ("attended", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("pools", Pools),
        ("options", Options),
    )


class Stack(ctypes.Structure):
    """All layers of a model, and the shapes that they share."""

    _fields_ = (
        ("layers", ctypes.POINTER(StackLayer)),
        ("last_norm", _POINTER),
        ("heads", Heads),
        ("hidden_size", _INTEGER),
        ("mlp_size", _INTEGER),
        ("norm_epsilon", _FLOAT),
    )


class LowRankMatrices(ctypes.Structure):
    """Matrices that an adapter adds to one linear layer; LowRank in C++."""

    _fields_ = (("down", _POINTER), ("up", _POINTER), ("rank", _INTEGER))


class LayerAdapter(ctypes.Structure):
    """An adapter adds these to the linear layers of one layer, in the order of StackLayer."""

    _fields_ = (("linears", LowRankMatrices * 4),)


class StepAdapters(ctypes.Structure):
    """The adapters of a step's tokens."""

    _fields_ = (
        ("layers", ctypes.POINTER(LayerAdapter)),
        ("slots", _POINTER),
        ("num_layers", _INTEGER),
        ("max_rank", _INTEGER),
    )


class Embeddings(ctypes.Structure):
    """A table of token embeddings."""

    _fields_ = (("rows", _POINTER), ("tied", ctypes.POINTER(Linear)), ("num_embeddings", _INTEGER))


class StackStep(ctypes.Structure):
    """Inputs and outputs of one call of the stack."""

    _fields_ = (
        ("hidden", _POINTER),
        ("token_ids", _POINTER),
        ("embeddings", ctypes.POINTER(Embeddings)),
        ("cosines", _POINTER),
        ("sines", _POINTER),
        ("angle_rows", _POINTER),
        ("output", _POINTER),
        ("head", ctypes.POINTER(Linear)),
        ("logits", _POINTER),
        ("sampled", _POINTER),
        ("num_sampled", _INTEGER),
        ("rotary_dim", _INTEGER),
        ("first_layer", _INTEGER),
        ("stop_layer", _INTEGER),
        ("phase_ns", _POINTER),
        ("adapters", ctypes.POINTER(StepAdapters)),
    )


class Experts(ctypes.Structure):
    """The experts of one layer."""

    _fields_ = (
        ("up", ctypes.POINTER(Linear)),
        ("down", ctypes.POINTER(Linear)),
        ("num_experts", _INTEGER),
        ("hidden_size", _INTEGER),
        ("mlp_size", _INTEGER),
        ("activation", _INTEGER),
        ("is_gated", _INTEGER),
    )


class ExpertStep(ctypes.Structure):
    """The tokens of a step with the experts that compute them."""

    _fields_ = (
        ("input", _POINTER),
        ("experts", _POINTER),
        ("weights", _POINTER),
        ("output", _POINTER),
        ("num_tokens", _INTEGER),
        ("num_chosen", _INTEGER),
        ("num_threads", _INTEGER),
    )
