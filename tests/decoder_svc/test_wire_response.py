"""Plain types become messages without a loss: every field, and times to the nanosecond."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest

from decoder_svc import wire_response
from decoder_svc.answer.generated_text import TextIncrement
from decoder_svc.engine.figures import EngineLoad
from decoder_svc.scheduling.prompt import ImageItem, Span
from decoder_svc.scheduling.request_output import FinishReason, RequestUsage, TokenLogprobs
from decoder_svc.tools.tool import CallDelta
from lookonce.common.v1 import common_pb2
from lookonce.content_key import ProcessorOptions
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from tests.decoder_svc.scheduling.simulation import image


@pytest.mark.parametrize("reason", FinishReason)
def test_every_finish_reason_has_a_value_of_its_name(reason: FinishReason) -> None:
    increment = TextIncrement("", (), (), reason)
    assert pb.FinishReason.Name(wire_response.finish_reason(increment)) == f"FINISH_REASON_{reason.name}"


def test_an_answer_that_ends_with_calls_says_so() -> None:
    choice = pb.Choice()
    parts = [
        TextIncrement("So. ", (), (), None, "hm"),
        TextIncrement("", (), (), None, "", (CallDelta(0, "", "a", "f"), CallDelta(0, '{"x"'))),
        TextIncrement("", (), (), FinishReason.STOP, "", (CallDelta(0, ": 1}"), CallDelta(1, "{}", "b", "g")), True),
    ]
    wire_response.complete(choice, parts)
    calls = [pb.ToolCall(id="a", name="f", arguments='{"x": 1}'), pb.ToolCall(id="b", name="g", arguments="{}")]
    assert choice == pb.Choice(text="So. ", reasoning="hm", tool_calls=calls, finish_reason=pb.FINISH_REASON_TOOL_CALLS)


def test_usage_has_every_count_and_both_times() -> None:
    counts = [field.name for field in dataclasses.fields(RequestUsage) if not field.name.endswith("_s")]
    record = RequestUsage(**{name: number for number, name in enumerate(counts, 1)})
    record.queue_time_s, record.time_to_first_token_s = 0.25, 61.000000001
    message = wire_response.usage(record)
    assert [getattr(message, name) for name in counts] == list(range(1, len(counts) + 1))
    assert message.queue_time.ToNanoseconds() == 250_000_000
    assert message.time_to_first_token.ToNanoseconds() == 61_000_000_001


def test_a_delta_has_the_index_of_its_first_token_and_one_entry_per_token() -> None:
    positions = (TokenLogprobs(((7, -0.5), (8, -1.5))), TokenLogprobs(((9, -0.25),)))
    message = wire_response.delta(TextIncrement("ab", (7, 9), positions, None), 2, 3)
    assert (message.text, list(message.token_ids)) == ("ab", [7, 9])
    assert (message.index, message.token_index) == (2, 3)
    assert [[(one.token_id, one.logprob) for one in position.top] for position in message.logprobs] == [
        [(7, -0.5), (8, -1.5)],
        [(9, -0.25)],
    ]


def test_a_placeholder_range_has_the_image_s_key() -> None:
    item: ImageItem = dataclasses.replace(image("x", 0, 4), span=Span(5, 4), options=ProcessorOptions(None))
    message = wire_response.placeholder_range(item)
    assert (message.offset, message.length) == (5, 4)
    assert message.key.digest == item.key.digest
    assert len(message.key.digest) == hashlib.sha256().digest_size
    assert message.key.algorithm == common_pb2.HASH_ALGORITHM_SHA256
    assert message.key.encoder_fingerprint == item.key.fingerprint


def test_the_load_has_every_figure() -> None:
    message = wire_response.load(EngineLoad(1, 2, 3, 0.5, 4))
    assert (message.running_requests, message.waiting_requests, message.waiting_for_embeddings) == (1, 2, 3)
    assert (message.kv_cache_usage, message.encoder_cache_rows) == (0.5, 4)
