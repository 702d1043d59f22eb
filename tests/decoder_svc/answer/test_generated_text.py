"""Engine outputs become the answer's text, ids and finish reason."""

from __future__ import annotations

import itertools

import pytest

from decoder_svc.answer.generated_text import GeneratedText, TextIncrement
from decoder_svc.prompt.sampling_check import SamplingLimits, SamplingSpec, check_sampling
from decoder_svc.scheduling.request_output import FinishReason, RequestOutput, RequestUsage, TokenLogprobs
from decoder_svc.service import LoadedText
from lookonce.model.generation_defaults import GenerationDefaults


def answer(
    text: LoadedText, spec: SamplingSpec, ids: list[int], cuts: tuple[int, ...], reason: FinishReason
) -> list[TextIncrement]:
    """Feeds the ids in outputs that end at `cuts`, the last one with the reason, until the text ends."""
    limits = SamplingLimits(text.vocab_size, 8, 8, 256)
    generated = GeneratedText(text.tokenizer, check_sampling(spec, GenerationDefaults(), limits))
    increments: list[TextIncrement] = []
    spans = list(itertools.pairwise((0, *cuts, len(ids))))
    for index, (start, end) in enumerate(spans):
        part = tuple(ids[start:end])
        logprobs = tuple(TokenLogprobs(((token_id, -1.0),)) for token_id in part)
        output = RequestOutput(part, logprobs, reason if index + 1 == len(spans) else None, RequestUsage())
        increments.append(generated.push(output))
        if increments[-1].finish_reason is not None:
            break
    assert generated.num_tokens == sum(len(increment.token_ids) for increment in increments)
    return increments


def joined(increments: list[TextIncrement]) -> tuple[str, list[int], FinishReason | None]:
    ids = [token_id for increment in increments for token_id in increment.token_ids]
    assert [position.top[0][0] for increment in increments for position in increment.logprobs] == ids
    return "".join(increment.text for increment in increments), ids, increments[-1].finish_reason


def ids_of(text: LoadedText, words: str) -> list[int]:
    return list(text.tokenizer.backend.encode(words, add_special_tokens=False).ids)


CUTS = [(), (1,), (1, 2), (2, 4), (1, 2, 3, 4, 5)]


@pytest.mark.parametrize("cuts", CUTS)
def test_the_text_does_not_depend_on_how_steps_were_coalesced(llava_text: LoadedText, cuts: tuple[int, ...]) -> None:
    ids = ids_of(llava_text, "one é two € three")
    result = joined(answer(llava_text, SamplingSpec(), ids, cuts, FinishReason.LENGTH))
    assert result == ("one é two € three", ids, FinishReason.LENGTH)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("stop", [" two", "o €", "wo"])
def test_a_stop_string_ends_the_answer_across_token_borders(
    llava_text: LoadedText, cuts: tuple[int, ...], stop: str
) -> None:
    whole = "one two € three two €"
    ids = ids_of(llava_text, whole)
    spec = SamplingSpec(stop=(stop,))
    text, taken, reason = joined(answer(llava_text, spec, ids, cuts, FinishReason.LENGTH))
    assert text == whole[: whole.index(stop)]
    assert reason is FinishReason.STOP
    assert taken == ids[: len(taken)]
    assert stop in llava_text.tokenizer.decode(taken, skip_special_tokens=True)
    assert stop not in llava_text.tokenizer.decode(taken[:-1], skip_special_tokens=True)


def test_text_that_only_began_like_a_stop_string_comes_out_in_the_end(llava_text: LoadedText) -> None:
    ids = ids_of(llava_text, "one two")
    increments = answer(llava_text, SamplingSpec(stop=("two three",)), ids, (len(ids) - 1,), FinishReason.LENGTH)
    assert joined(increments) == ("one two", ids, FinishReason.LENGTH)


def test_the_stop_tokens_text_is_not_part_of_the_answer(llava_text: LoadedText) -> None:
    ids = ids_of(llava_text, "one two")
    spec = SamplingSpec(stop_token_ids=(ids[-1],))
    text, taken, reason = joined(answer(llava_text, spec, ids, (), FinishReason.STOP))
    assert "one two".startswith(text)
    assert text != "one two"
    assert (taken, reason) == (ids, FinishReason.STOP)
    spent = joined(answer(llava_text, spec, ids, (), FinishReason.LENGTH))
    assert spent == ("one two", ids, FinishReason.LENGTH)


@pytest.mark.parametrize("cuts", [(), (1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 2), (1, 2), (2, 4), (3, 4), (4, 6), (6, 7), (7, 7)])
def test_stop_strings_count_only_behind_min_tokens(
    llava_text: LoadedText, min_tokens: int, num_tokens: int, cuts: tuple[int, ...]
) -> None:
    ids = ids_of(llava_text, "a.b.c.d")
    assert len(ids) == 7
    spec = SamplingSpec(stop=(".",), min_tokens=min_tokens)
    text, taken, reason = joined(answer(llava_text, spec, ids, cuts, FinishReason.LENGTH))
    is_whole = num_tokens == 7
    assert (text, len(taken)) == ("a.b.c.d" if is_whole else "a.b.c.d"[: num_tokens - 1], num_tokens)
    assert reason is (FinishReason.LENGTH if is_whole else FinishReason.STOP)


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(0, ("x", FinishReason.STOP)), (9, ("x\ufffd", FinishReason.LENGTH))]
)
def test_half_a_character_at_the_end_is_a_stop_string_only_behind_min_tokens(
    llava_text: LoadedText, min_tokens: int, expected: tuple[str, FinishReason]
) -> None:
    ids = ids_of(llava_text, "x😀")[:-1]
    spec = SamplingSpec(stop=("\ufffd",), min_tokens=min_tokens)
    text, _, reason = joined(answer(llava_text, spec, ids, (), FinishReason.LENGTH))
    assert (text, reason) == expected


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.LENGTH])
def test_an_answer_that_breaks_off_inside_a_character_shows_that(llava_text: LoadedText, reason: FinishReason) -> None:
    ids = ids_of(llava_text, "x😀")[:-1]
    assert joined(answer(llava_text, SamplingSpec(), ids, (1,), reason)) == ("x\ufffd", ids, reason)


def test_an_empty_last_output_ends_the_answer(llava_text: LoadedText) -> None:
    ids = ids_of(llava_text, "one")
    increments = answer(llava_text, SamplingSpec(), ids, (len(ids),), FinishReason.ABORT)
    assert increments[-1].token_ids == ()
    assert joined(increments) == ("one", ids, FinishReason.ABORT)
