"""Checks the sampling values of a request and fills in defaults. Knows neither gRPC messages nor the sampler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from decoder_svc.constraint.constraint_checker import field_of
from decoder_svc.constraint.fixed_answer import fixed_tokens
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind, Pooling, SamplingParams
from lookonce.errors import ContextTooLongError, InvalidParameterError, UnsupportedError
from lookonce.model.generation_defaults import GenerationDefaults
from lookonce.model.sampling_ranges import SAMPLING_RANGES, shown

# Most answers to one prompt.
MAX_CHOICES = 128
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
# Most entries of log probabilities for a prompt: a response with them takes about 1.5 MB.
MAX_PROMPT_LOGPROBS = 1 << 17
# Longest text of a constraint. A grammar of this size is checked in about 50 ms.
MAX_CONSTRAINT_CHARS = 128 * 1024


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """Sampling values as the caller sent them; None means not set."""

    # 0 means greedy decoding.
    temperature: float | None = None
    top_p: float | None = None
    # 0 means no limit.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Token id → addend.
    logit_bias: Mapping[int, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    # Number of choices, and of answers among which the best ones are chosen.
    n: int | None = None
    best_of: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # None: any text.
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class NumChoices:
    """The number of answers of a request."""

    num_returned: int
    # Answers that are generated; the others are dropped.
    num_answers: int

    # Whether the answers are put in order by their log probability.
    are_ranked: bool = False


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """The server's limits on sampling values."""

    # Valid token ids are 0..vocab_size - 1.
    vocab_size: int
    # Most stop strings per request.
    max_stop_strings: int
    # Most alternatives reported per token.
    max_logprobs: int
    # max_tokens of a request that does not set it.
    default_max_tokens: int


@dataclass(frozen=True, slots=True)
class CheckedSampling:
    """Sampling values that passed all checks."""

    params: SamplingParams
    # Non-empty texts that end the generation.
    stop_strings: tuple[str, ...]
    # Whether the caller set max_tokens. If not, the default is reduced to the room left in the context.
    has_max_tokens: bool


def check_sampling(spec: SamplingSpec, defaults: GenerationDefaults, limits: SamplingLimits) -> CheckedSampling:
    """Returns checked values with every default filled in.

    Raises InvalidParameterError naming the field (`sampling.top_p`), its value and the limit, or UnsupportedError.
    """
    _check_constraint(spec)
    check_num_choices(spec.n, spec.best_of)
    max_tokens = _integer("max_tokens", spec.max_tokens, 1, None, limits.default_max_tokens)
    # A constraint says by itself where an answer may end.
    least = defaults.min_tokens if spec.constraint is None else 0
    params = SamplingParams(
        temperature=_number("temperature", spec.temperature, defaults.temperature),
        top_p=_number("top_p", spec.top_p, defaults.top_p),
        # The API uses 0 for "no limit", the engine None.
        top_k=(spec.top_k if spec.top_k is not None else defaults.top_k) or None,
        min_p=_number("min_p", spec.min_p, defaults.min_p),
        repetition_penalty=_number("repetition_penalty", spec.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_number("presence_penalty", spec.presence_penalty, 0.0),
        frequency_penalty=_number("frequency_penalty", spec.frequency_penalty, 0.0),
        logit_bias=_logit_bias(spec.logit_bias or {}, defaults, limits.vocab_size),
        max_tokens=max_tokens,
        min_tokens=_integer("min_tokens", spec.min_tokens, 0, max_tokens, min(least, max_tokens)),
        stop_token_ids=_stop_token_ids(spec, defaults, limits.vocab_size),
        seed=spec.seed,
        constraint=spec.constraint,
        logprobs=_num_logprobs(spec, limits),
        prompt_logprobs=None
        if spec.prompt_logprobs is None
        else _integer("prompt_logprobs", spec.prompt_logprobs, 0, limits.max_logprobs, 0),
    )
    if params.constraint is not None and not params.stop_token_ids:
        raise UnsupportedError("this model has no end-of-sequence token, which structured output needs")
    return CheckedSampling(params, _stop_strings(spec.stop, limits), has_max_tokens=spec.max_tokens is not None)


def fixed_sampling(token_ids: Sequence[int], num_logprobs: int | None, limits: SamplingLimits) -> CheckedSampling:
    """Returns the values for an answer that has these tokens and tells how likely they are.

    Raises InvalidParameterError for too many alternatives per token.
    """
    number = num_logprobs or 0
    if not 0 <= number <= limits.max_logprobs:
        raise InvalidParameterError("logprobs", f"must be in [0, {limits.max_logprobs}], got {shown(number)}")
    params = SamplingParams(
        max_tokens=len(token_ids),
        constraint=Constraint(ConstraintKind.FIXED_TOKENS, fixed_tokens(token_ids)),
        # The likeliest token tells whether greedy decoding would choose this one.
        logprobs=max(number, 1),
    )
    return CheckedSampling(params, (), has_max_tokens=True)


def embedding_sampling(pooling: Pooling) -> CheckedSampling:
    """Returns the values for a request whose first token comes with the prompt's embedding."""
    return CheckedSampling(SamplingParams(max_tokens=1, pooling=pooling), (), has_max_tokens=True)


def check_num_choices(number: int | None, best_of: int | None) -> NumChoices:
    """Returns how many answers are generated and returned. Raises InvalidParameterError for numbers out of range."""
    num_returned = _integer("n", number, 1, MAX_CHOICES, 1)
    num_answers = _integer("best_of", best_of, num_returned, MAX_CHOICES, num_returned)
    return NumChoices(num_returned, num_answers, are_ranked=best_of is not None and num_answers > 1)


def _num_logprobs(spec: SamplingSpec, limits: SamplingLimits) -> int | None:
    number = None if spec.logprobs is None else _integer("logprobs", spec.logprobs, 0, limits.max_logprobs, 0)
    # The best answers are found by the log probabilities of their tokens, and those of the prompt come with the first.
    is_needed = spec.prompt_logprobs is not None or check_num_choices(spec.n, spec.best_of).are_ranked
    return 0 if number is None and is_needed else number


def fit_to_context(sampling: CheckedSampling, num_prompt_tokens: int, max_context_tokens: int) -> SamplingParams:
    """Returns the parameters for a prompt of this length, with a default max_tokens reduced to the room that is left.

    Raises ContextTooLongError if prompt and completion do not fit into the context.
    """
    params = sampling.params
    num_free = max_context_tokens - num_prompt_tokens
    wanted = params.num_context_tokens if sampling.has_max_tokens else max(params.min_tokens, 1)
    if wanted > num_free:
        raise ContextTooLongError(
            f"{num_prompt_tokens} prompt tokens plus {wanted} to generate are over the context of {max_context_tokens}"
        )
    if params.prompt_logprobs is not None:
        num_entries = num_prompt_tokens * (1 + params.prompt_logprobs)
        if num_entries > MAX_PROMPT_LOGPROBS:
            raise InvalidParameterError(
                "sampling.prompt_logprobs",
                f"{num_prompt_tokens} prompt tokens with {params.prompt_logprobs} others each are {num_entries} "
                f"entries, the limit is {MAX_PROMPT_LOGPROBS}",
            )
    return replace(params, max_tokens=min(params.max_tokens, max(num_free, 1)))


def _check_constraint(spec: SamplingSpec) -> None:
    if spec.constraint is None:
        return
    name = field_of(spec.constraint)
    is_empty = not spec.constraint.text and spec.constraint.kind is not ConstraintKind.JSON_OBJECT
    if is_empty or len(spec.constraint.text) > MAX_CONSTRAINT_CHARS:
        raise InvalidParameterError(
            name, f"must be 1 to {MAX_CONSTRAINT_CHARS} characters long, got {len(spec.constraint.text)}"
        )
    if spec.ignore_eos:
        raise InvalidParameterError("sampling.ignore_eos", f"cannot be combined with {name}")
    if spec.min_tokens:
        raise InvalidParameterError("sampling.min_tokens", f"cannot be combined with {name}")
    if spec.stop_token_ids:
        raise InvalidParameterError("sampling.stop_token_ids", f"cannot be combined with {name}; use stop")


def _number(name: str, value: float | None, default: float) -> float:
    if value is None:
        return default
    if value not in SAMPLING_RANGES[name]:
        raise _out_of_range(name, value, f"in {SAMPLING_RANGES[name]}")
    return value


def _integer(name: str, value: int | None, low: int, high: int | None, default: int) -> int:
    if value is None:
        return default
    if value < low or (high is not None and value > high):
        raise _out_of_range(name, value, f"at least {low}" if high is None else f"in [{low}, {high}]")
    return value


def _logit_bias(
    bias: Mapping[int, float], defaults: GenerationDefaults, vocab_size: int
) -> tuple[tuple[int, float], ...]:
    """Returns the caller's biases, and -inf for the tokens that the model must not generate."""
    if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise _out_of_range("logit_bias", len(bias), f"at most {MAX_LOGIT_BIAS_ENTRIES} entries")
    _check_ids("logit_bias", tuple(bias), vocab_size)
    for token_id, addend in bias.items():
        if not -MAX_LOGIT_BIAS <= addend <= MAX_LOGIT_BIAS:
            allowed = f"in [{-MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]"
            raise _out_of_range("logit_bias", addend, f"{allowed} (token {token_id})")
    suppressed = dict.fromkeys(_known(defaults.suppressed_token_ids, vocab_size), -math.inf)
    return tuple(sorted({**bias, **suppressed}.items()))


def _stop_token_ids(spec: SamplingSpec, defaults: GenerationDefaults, vocab_size: int) -> frozenset[int]:
    if len(spec.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _out_of_range("stop_token_ids", len(spec.stop_token_ids), f"at most {MAX_STOP_TOKEN_IDS} ids")
    _check_ids("stop_token_ids", spec.stop_token_ids, vocab_size)
    own_ids = frozenset() if spec.ignore_eos else _known(defaults.eos_token_ids, vocab_size)
    return frozenset(spec.stop_token_ids) | own_ids


def _known(token_ids: frozenset[int], vocab_size: int) -> frozenset[int]:
    """Returns those of a folder's ids for which the model has a logit; the others can never be generated."""
    return frozenset(token_id for token_id in token_ids if 0 <= token_id < vocab_size)


def _stop_strings(stop: Sequence[str], limits: SamplingLimits) -> tuple[str, ...]:
    if len(stop) > limits.max_stop_strings:
        raise _out_of_range("stop", len(stop), f"at most {limits.max_stop_strings} strings")
    for index, text in enumerate(stop):
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            raise _out_of_range(f"stop[{index}]", len(text), f"1 to {MAX_STOP_STRING_CHARS} characters long")
    return tuple(dict.fromkeys(stop))


def _check_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise _out_of_range(name, token_id, f"a token id in [0, {vocab_size - 1}]")


def _out_of_range(name: str, value: float, allowed: str) -> InvalidParameterError:
    return InvalidParameterError(f"sampling.{name}", f"must be {allowed}, got {shown(value)}")
