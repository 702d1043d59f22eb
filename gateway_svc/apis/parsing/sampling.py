"""Sampling options of requests, as the SDK's. The decoder checks their ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from gateway_svc.apis.parsing.fields import HONOURED, Field, Fields
from lookonce.generation import GenerateOptions

MAX_ANSWERS = 16
# OpenAI's seeds may be negative; the decoder's have 64 bits.
_SEEDS = 1 << 64
_MAX_BIASES = 1024

# Fields that chats and completions share.
SAMPLING: Mapping[str, Field] = {
    "temperature": Field("honoured", "Default: the model's own, without one greedy."),
    "top_p": HONOURED,
    "presence_penalty": HONOURED,
    "frequency_penalty": HONOURED,
    "logit_bias": HONOURED,
    "seed": Field("honoured", "Up to 64 bits; a negative one counts from 2⁶⁴ downwards."),
    "stop": HONOURED,
    "n": Field(
        "honoured",
        f"1 to {MAX_ANSWERS} answers, each a request of its own to the decoder. With a seed, answer i has seed + i.",
    ),
}


def sampling_options(fields: Fields) -> GenerateOptions:
    """Returns the options that have the same meaning in all requests. Raises InvalidParameterError for wrong types."""
    seed, top_k = fields.integer("seed"), fields.integer("top_k")
    if seed is not None and not -_SEEDS // 2 <= seed < _SEEDS:
        raise fields.wrong("seed", "must have at most 64 bits")
    options: dict[str, Any] = {
        "temperature": fields.number("temperature"),
        "top_p": fields.number("top_p"),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "logit_bias": _logit_bias(fields),
        "seed": None if seed is None else seed % _SEEDS,
        "stop": fields.texts("stop"),
        # vLLM's clients write -1 for no limit.
        "top_k": 0 if top_k == -1 else top_k,
        "min_p": fields.number("min_p"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "min_tokens": fields.integer("min_tokens"),
        "stop_token_ids": fields.integers("stop_token_ids"),
        "ignore_eos": fields.flag("ignore_eos"),
        "regex": fields.text("regex"),
        "grammar": fields.text("grammar"),
        "choice": fields.texts("choice"),
        "priority": fields.integer("priority"),
        "cache_salt": fields.text("cache_salt"),
        "bypass_prefix_cache": fields.flag("bypass_prefix_cache"),
    }
    return cast(GenerateOptions, {name: value for name, value in options.items() if value is not None})


def num_answers(fields: Fields) -> int:
    """Returns the number of answers that are asked for."""
    number = fields.integer("n")
    if number is None:
        return 1
    if not 1 <= number <= MAX_ANSWERS:
        raise fields.wrong("n", f"must be 1 to {MAX_ANSWERS}, got {number}")
    return number


def _logit_bias(fields: Fields) -> dict[int, float] | None:
    value = fields.raw("logit_bias")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise fields.wrong("logit_bias", "must be an object of token ids and numbers")
    if len(value) > _MAX_BIASES:
        raise fields.wrong("logit_bias", f"has {len(value)} tokens, the limit is {_MAX_BIASES}")
    bias: dict[int, float] = {}
    for key, number in value.items():
        is_id = key.isascii() and key.isdecimal() and len(key) < 11
        if not is_id or not isinstance(number, int | float) or isinstance(number, bool):
            raise fields.wrong("logit_bias", "must be an object of token ids and numbers")
        bias[int(key)] = number
    return bias
