"""Sampling values: what is in range passes unchanged, what is not is refused by field, what is unset is filled in."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.prompt.sampling_check import (
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_TOKEN_IDS,
    CheckedSampling,
    SamplingLimits,
    SamplingSpec,
    check_sampling,
    fit_to_context,
)
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind, SamplingParams
from lookonce.errors import ContextTooLongError, InvalidParameterError, UnsupportedError
from lookonce.model.generation_defaults import GenerationDefaults

LIMITS = SamplingLimits(vocab_size=100, max_stop_strings=2, max_logprobs=5, default_max_tokens=40)
PLAIN = GenerationDefaults(eos_token_ids=frozenset({2, 3}))


def checked(spec: SamplingSpec, defaults: GenerationDefaults = PLAIN) -> SamplingParams:
    return check_sampling(spec, defaults, LIMITS).params


def with_value(name: str, value: float) -> SamplingSpec:
    fields: dict[str, Any] = {name: value}
    return SamplingSpec(**fields)


NUMBERS = [
    ("temperature", 0.0, 100.0, True),
    ("top_p", 0.0, 1.0, False),
    ("min_p", 0.0, 1.0, True),
    ("repetition_penalty", 0.0, 10.0, False),
    ("presence_penalty", -2.0, 2.0, True),
    ("frequency_penalty", -2.0, 2.0, True),
]


@pytest.mark.parametrize(("name", "low", "high", "has_low"), NUMBERS)
def test_numbers_outside_their_range_are_refused_by_name(name: str, low: float, high: float, has_low: bool) -> None:
    just_outside = [math.nextafter(low, -math.inf), math.nextafter(high, math.inf), *([] if has_low else [low])]
    for value in (*just_outside, math.nan, math.inf, -math.inf, 1e308):
        with pytest.raises(InvalidParameterError) as caught:
            checked(with_value(name, value))
        assert caught.value.field == f"sampling.{name}"


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        (SamplingSpec(stop_token_ids=(1_000_000,)), "got 1000000"),
        (SamplingSpec(top_p=1.0000001192092896), "got 1.0000001"),
        (SamplingSpec(top_p=1.100000023841858), "got 1.1"),
    ],
)
def test_a_refusal_shows_the_value_as_it_was_sent(spec: SamplingSpec, shown: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        checked(spec)
    assert caught.value.description.endswith(shown)


@pytest.mark.parametrize(("name", "low", "high", "has_low"), NUMBERS)
def test_numbers_inside_their_range_pass_unchanged(name: str, low: float, high: float, has_low: bool) -> None:
    for value in (low if has_low else math.nextafter(low, math.inf), (low + high) / 2, high):
        assert getattr(checked(with_value(name, value)), name) == value


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (SamplingSpec(max_tokens=0), "max_tokens"),
        (SamplingSpec(max_tokens=5, min_tokens=6), "min_tokens"),
        (SamplingSpec(min_tokens=41), "min_tokens"),
        (SamplingSpec(logprobs=6), "logprobs"),
        (SamplingSpec(n=0), "n"),
        (SamplingSpec(n=129), "n"),
        (SamplingSpec(stop=("a", "b", "c")), "stop"),
        (SamplingSpec(stop=("a", "")), "stop[1]"),
        (SamplingSpec(stop=("a" * (MAX_STOP_STRING_CHARS + 1),)), "stop[0]"),
        (SamplingSpec(stop_token_ids=(5, 100)), "stop_token_ids"),
        (SamplingSpec(stop_token_ids=(5,) * (MAX_STOP_TOKEN_IDS + 1)), "stop_token_ids"),
        (SamplingSpec(logit_bias={100: 1.0}), "logit_bias"),
        (SamplingSpec(logit_bias={5: 100.5}), "logit_bias"),
        (SamplingSpec(logit_bias={5: -math.inf}), "logit_bias"),
        (SamplingSpec(logit_bias={5: math.nan}), "logit_bias"),
        (SamplingSpec(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS_ENTRIES + 1), 0.0)), "logit_bias"),
    ],
)
def test_values_over_their_limits_are_refused_by_name(spec: SamplingSpec, field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        checked(spec)
    assert caught.value.field == f"sampling.{field}"


DIGITS = Constraint(ConstraintKind.REGEX, "[0-9]+")


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (SamplingSpec(constraint=DIGITS, min_tokens=1), "min_tokens"),
        (SamplingSpec(constraint=DIGITS, ignore_eos=True), "ignore_eos"),
        (SamplingSpec(constraint=DIGITS, stop_token_ids=(5,)), "stop_token_ids"),
        (SamplingSpec(constraint=Constraint(ConstraintKind.REGEX, "")), "regex"),
        (SamplingSpec(constraint=Constraint(ConstraintKind.GRAMMAR, "a" * 131_073)), "grammar"),
    ],
)
def test_a_constraint_excludes_other_rules_about_the_end_and_has_a_length(spec: SamplingSpec, field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        checked(spec)
    assert caught.value.field == f"sampling.{field}"


def test_a_constraint_does_without_the_folders_min_tokens_and_needs_a_token_that_ends_the_answer() -> None:
    defaults = GenerationDefaults(eos_token_ids=frozenset({2}), min_tokens=5)
    assert check_sampling(SamplingSpec(), defaults, LIMITS).params.min_tokens == 5
    assert check_sampling(SamplingSpec(constraint=DIGITS), defaults, LIMITS).params.min_tokens == 0
    with pytest.raises(UnsupportedError, match="end-of-sequence"):
        check_sampling(SamplingSpec(constraint=DIGITS), GenerationDefaults(), LIMITS)


def test_unset_parameters_come_from_the_model_folder() -> None:
    defaults = GenerationDefaults(
        temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.05, eos_token_ids=frozenset({2, 3})
    )
    assert checked(SamplingSpec(), defaults) == SamplingParams(
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        min_p=0.1,
        repetition_penalty=1.05,
        max_tokens=40,
        stop_token_ids=frozenset({2, 3}),
    )


def test_suppressed_tokens_cannot_be_generated_whatever_the_caller_asks() -> None:
    defaults = GenerationDefaults(suppressed_token_ids=frozenset({5, 9, 100, -1}))
    params = checked(SamplingSpec(logit_bias={4: 2.0, 9: 100.0}), defaults)
    # The folder's ids that the model does not have change nothing.
    assert params.logit_bias == ((4, 2.0), (5, -math.inf), (9, -math.inf))


def test_an_end_of_sequence_outside_the_vocabulary_changes_nothing() -> None:
    assert checked(SamplingSpec(), GenerationDefaults(eos_token_ids=frozenset({2, 100}))).stop_token_ids == {2}


def test_the_folders_least_length_gives_way_to_the_callers_values() -> None:
    defaults = GenerationDefaults(min_tokens=8)
    assert checked(SamplingSpec(), defaults).min_tokens == 8
    assert checked(SamplingSpec(max_tokens=5), defaults).min_tokens == 5
    assert checked(SamplingSpec(min_tokens=0), defaults).min_tokens == 0


def test_zero_differs_from_unset() -> None:
    defaults = GenerationDefaults(temperature=0.7, top_k=20, min_p=0.1)
    params = checked(SamplingSpec(temperature=0.0, top_k=0, min_p=0.0, seed=0, logprobs=0, min_tokens=0), defaults)
    assert params.is_greedy
    assert params.top_k is None
    assert params.min_p == 0.0
    assert params.seed == 0
    assert params.logprobs == 0


def test_own_stop_ids_join_the_end_of_sequence_unless_it_is_ignored() -> None:
    assert checked(SamplingSpec(stop_token_ids=(7,))).stop_token_ids == {2, 3, 7}
    assert checked(SamplingSpec(stop_token_ids=(7,), ignore_eos=True)).stop_token_ids == {7}


def test_stop_strings_and_biases_keep_their_meaning() -> None:
    result = check_sampling(SamplingSpec(stop=("b", "b"), logit_bias={9: -1.0, 4: 2.0}), PLAIN, LIMITS)
    assert result.stop_strings == ("b",)
    assert result.params.logit_bias == ((4, 2.0), (9, -1.0))


def sampling(max_tokens: int | None, min_tokens: int | None = None) -> CheckedSampling:
    return check_sampling(SamplingSpec(max_tokens=max_tokens, min_tokens=min_tokens), PLAIN, LIMITS)


def test_stated_max_tokens_must_fit_and_the_default_gives_way() -> None:
    assert fit_to_context(sampling(30), 70, 100).max_tokens == 30
    with pytest.raises(ContextTooLongError, match=r"71 prompt tokens plus 30 .* context of 100"):
        fit_to_context(sampling(30), 71, 100)
    assert fit_to_context(sampling(None), 71, 100).max_tokens == 29
    assert fit_to_context(sampling(None), 10, 100).max_tokens == 40
    assert fit_to_context(sampling(None), 99, 100).max_tokens == 1


@pytest.mark.parametrize("num_prompt_tokens", [100, 101, 10_000])
def test_a_prompt_without_room_for_one_token_is_too_long(num_prompt_tokens: int) -> None:
    with pytest.raises(ContextTooLongError, match=str(num_prompt_tokens)):
        fit_to_context(sampling(None), num_prompt_tokens, 100)


def test_the_default_does_not_give_way_below_min_tokens() -> None:
    assert fit_to_context(sampling(None, 20), 80, 100).max_tokens == 20
    with pytest.raises(ContextTooLongError):
        fit_to_context(sampling(None, 20), 81, 100)


ANY_FLOAT = st.none() | st.floats()
ANY_INT = st.none() | st.integers(0, 2**32 - 1)


@given(
    st.builds(
        SamplingSpec,
        temperature=ANY_FLOAT,
        top_p=ANY_FLOAT,
        top_k=ANY_INT,
        min_p=ANY_FLOAT,
        repetition_penalty=ANY_FLOAT,
        presence_penalty=ANY_FLOAT,
        logit_bias=st.dictionaries(st.integers(0, 200), st.floats()),
        max_tokens=ANY_INT,
        min_tokens=ANY_INT,
        logprobs=ANY_INT,
        stop=st.lists(st.text(max_size=3), max_size=3).map(tuple),
    )
)
def test_any_values_are_either_in_range_or_refused(spec: SamplingSpec) -> None:
    try:
        params = checked(spec)
    except InvalidParameterError:
        return
    assert 0 <= params.temperature <= 100
    assert 0 < params.top_p <= 1
    assert 0 <= params.min_p <= 1
    assert 0 < params.repetition_penalty <= 10
    assert all(0 <= token_id < 100 and abs(value) <= 100 for token_id, value in params.logit_bias)
    assert params.min_tokens <= params.max_tokens
    assert params.top_k is None or params.top_k >= 1
