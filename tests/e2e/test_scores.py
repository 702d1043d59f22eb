"""Likelihoods of answers to pictures: the right answer is the likeliest, in both clients and both kinds of engines."""

from __future__ import annotations

import pytest

from lookonce import AsyncClient, Client, Message, Scoring
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.errors import InternalError, InvalidParameterError
from lookonce.local.local_stack import LocalStack
from lookonce.sdk.answers import scoring_of
from tests.conftest import DEMO_MODEL, ONE_THREAD
from tests.e2e.pictures import QUESTION, fresh


def check(scoring: Scoring, right: int) -> None:
    """Checks that one answer is likelier than all others, and the only one of greedy decoding."""
    best = max(scoring.scores, key=lambda score: score.logprob)
    assert scoring.scores.index(best) == right
    assert [score.is_greedy for score in scoring.scores] == [index == right for index in range(len(scoring.scores))]
    for score in scoring.scores:
        assert score.logprob == pytest.approx(sum(score.token_logprobs))
        assert len(score.token_ids) == len(score.token_logprobs)
        assert not score.logprobs
    assert scoring.usage.completion_tokens == sum(len(score.token_ids) for score in scoring.scores)


def test_the_answer_to_a_picture_is_the_likeliest(stack: LocalStack) -> None:
    pictures = fresh(3)
    answers = [picture.answer for picture in pictures]
    with Client.connect(stack.decoder_targets[0]) as client:
        for right, picture in enumerate(pictures):
            scoring = client.score(QUESTION, answers, images=[picture.data])
            check(scoring, right)
            assert scoring.usage.image_tokens == scoring.usage.encoded_image_tokens > 0
            chat = [Message("user", [picture.data, QUESTION])]
            again = client.score(chat, [score.token_ids for score in scoring.scores], logprobs=2)
            assert [score.token_ids for score in again.scores] == [score.token_ids for score in scoring.scores]
            assert again.usage.encoded_image_tokens == 0
            for one, other in zip(scoring.scores, again.scores, strict=True):
                assert other.token_logprobs == pytest.approx(one.token_logprobs, abs=1e-4)
                assert [len(position) for position in other.logprobs] == [3] * len(one.token_ids)


async def test_the_other_client_and_an_engine_process() -> None:
    pictures = fresh(2)
    answers = [picture.answer for picture in pictures]
    flags = (*ONE_THREAD, "--engine", "process")
    with LocalStack(DEMO_MODEL, num_encoders=1, num_decoders=1, decoder_arguments=flags) as stack:
        async with AsyncClient.connect(stack.decoder_targets[0]) as client:
            for right, picture in enumerate(pictures):
                check(await client.score(QUESTION, answers, images=[picture.data]), right)


def test_wrong_values_are_named(stack: LocalStack) -> None:
    with Client.connect(stack.decoder_targets[0]) as client:
        for continuations, options, field in (
            ("yes", {}, "continuations"),
            ([], {}, "continuations"),
            ([5], {}, "token_ids"),
            ([""], {}, "continuations[0]"),
            (["yes"], {"temperature": 0.5}, "temperature"),
            (["yes"], {"logprobs": -1}, "logprobs"),
            (["yes"], {"logprobs": 10_000}, "logprobs"),
        ):
            with pytest.raises(InvalidParameterError) as caught:
                client.score("x", continuations, **options)  # type: ignore[arg-type]
            assert caught.value.field == field


def test_a_missing_score_is_an_error() -> None:
    with pytest.raises(InternalError, match="1 scores for 2"):
        scoring_of(pb.ScoreResponse(scores=[pb.Score()]), 2)
