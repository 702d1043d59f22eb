"""The structures that the C++ parts take, field by field as in native/step.h, native/linear.h and native/stack.cpp."""

from __future__ import annotations

import ctypes

# What a stack's time is told apart by (native/stack.cpp).
PHASES = ("norms", "query_key_value", "rotation", "attention", "attended", "gate_up", "down")

_POINTER, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class BlockGroup(ctypes.Structure):
    """Of one group of layers: where the tokens of a step lie in its pools."""

    _fields_ = (
        ("slots", _POINTER),
        ("blocks", _POINTER),
        ("first_blocks", _POINTER),
        ("first_keys", _POINTER),
    )


class Step(ctypes.Structure):
    """The sequences of one step."""

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
    """What the attention of all layers has in common."""

    _fields_ = (
        ("num_heads", _INTEGER),
        ("num_kv_heads", _INTEGER),
        ("head_dim", _INTEGER),
        ("block_size", _INTEGER),
        ("block_slots", _INTEGER),
    )


class Pools(ctypes.Structure):
    """A layer's keys and values."""

    _fields_ = (("keys", _POINTER), ("values", _POINTER))


class Options(ctypes.Structure):
    """What a layer's attention is computed with."""

    _fields_ = (("group", _INTEGER), ("window", _INTEGER), ("scale", _FLOAT), ("softcap", _FLOAT))


class Linear(ctypes.Structure):
    """A linear layer with packed weights."""

    _fields_ = (("panels", _POINTER), ("bias", _POINTER), ("num_inputs", _INTEGER), ("num_outputs", _INTEGER))


class StackLayer(ctypes.Structure):
    """One layer of a stack."""

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
    """All layers, and what they have in common."""

    _fields_ = (
        ("layers", ctypes.POINTER(StackLayer)),
        ("last_norm", _POINTER),
        ("heads", Heads),
        ("hidden_size", _INTEGER),
        ("mlp_size", _INTEGER),
        ("norm_epsilon", _FLOAT),
    )


class StackStep(ctypes.Structure):
    """What one call of the stack reads and writes."""

    _fields_ = (
        ("hidden", _POINTER),
        ("cosines", _POINTER),
        ("sines", _POINTER),
        ("output", _POINTER),
        ("rotary_dim", _INTEGER),
        ("first_layer", _INTEGER),
        ("stop_layer", _INTEGER),
        ("phase_ns", _POINTER),
    )
