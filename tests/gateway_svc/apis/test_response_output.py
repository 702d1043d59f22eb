"""Items of responses have the log-probabilities of their texts' tokens, and the status of their ends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from itertools import chain
from typing import Any, cast

import pytest

from gateway_svc.answers import Ask, End, Event, Piece
from gateway_svc.apis import responses
from gateway_svc.apis.api import Context
from gateway_svc.apis.responses import ResponseRequest
from lookonce.generation import Delta, FinishReason, Generation, TokenLogprobs, ToolCallDelta, Usage

USAGE = Usage(0, 0, 0, 0, 0, 0, 0, queue_time_s=0.0, time_to_first_token_s=0.0)
REQUEST = {"model": "m", "input": "hello", "top_logprobs": 0}
CALL = Delta(tool_calls=(ToolCallDelta(0, "{}", "c0", "f"),))


async def token_texts(token_ids: Sequence[int]) -> list[str]:
    return [str(token_id) for token_id in token_ids]


CONTEXT = Context(cast(Any, None), "m", "id", 1.0, token_texts, 0, lambda num_bytes: None)


def tokens(*token_ids: int) -> tuple[TokenLogprobs, ...]:
    return tuple(((token_id, -0.5),) for token_id in token_ids)


def ids_of(entries: Sequence[Any]) -> list[int]:
    return [int(entry["token"]) for entry in entries]


def answering(
    monkeypatch: pytest.MonkeyPatch, pieces: Sequence[tuple[Delta, Sequence[int]]], reason: FinishReason, *last: int
) -> None:
    """Makes decoders answer with pieces of known tokens, and with tokens behind the last piece."""

    async def events(*_: object) -> AsyncIterator[Event]:
        for delta, token_ids in pieces:
            yield Piece(0, delta, tokens(*token_ids), USAGE)
        yield End(0, Generation("", (), reason, USAGE, "id"), tokens(*last))

    monkeypatch.setattr(responses, "answer_events", events)


async def told(request: ResponseRequest) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns a response, after comparing it with the one in a stream, and the events of the stream."""
    ask = Ask([], {})
    whole = await request.whole(ask, CONTEXT)
    events = [json.loads(event.partition(b"data: ")[2]) async for event in request.events(ask, CONTEXT)]
    assert events[-1]["response"] == whole
    return whole, events


@pytest.mark.parametrize(
    ("pieces", "last", "expected"),
    [
        ([], [9], [[9]]),
        ([(Delta("a"), [1, 2]), (Delta("b"), [3])], [9], [[1, 2, 3, 9]]),
        ([(Delta(reasoning="r"), [1, 2]), (Delta("a"), [3])], [9], [[3, 9]]),
        ([(Delta("a"), [1]), (CALL, [2, 3])], [9], [[1]]),
        ([(CALL, [1])], [9], []),
        ([(Delta("a"), [1]), (CALL, [2]), (Delta("b"), [3])], [], [[1], [3]]),
    ],
)
async def test_log_probabilities_are_those_of_texts(
    monkeypatch: pytest.MonkeyPatch, pieces: Any, last: list[int], expected: list[list[int]]
) -> None:
    answering(monkeypatch, pieces, "stop", *last)
    whole, events = await told(ResponseRequest.parse(REQUEST))
    texts = [item["content"][0] for item in whole["output"] if item["type"] == "message"]
    assert [ids_of(text["logprobs"]) for text in texts] == expected
    deltas = [ids_of(event["logprobs"]) for event in events if event["type"] == "response.output_text.delta"]
    assert list(chain(*deltas)) == list(chain(*expected))
    done = [ids_of(event["logprobs"]) for event in events if event["type"] == "response.output_text.done"]
    assert done == expected


@pytest.mark.parametrize(
    ("reason", "status", "last_status"),
    [
        ("stop", "completed", "completed"),
        ("tool_calls", "completed", "completed"),
        ("length", "incomplete", "incomplete"),
        ("abort", "incomplete", "incomplete"),
    ],
)
async def test_only_the_last_item_of_an_answer_that_was_cut_off_is_incomplete(
    monkeypatch: pytest.MonkeyPatch, reason: FinishReason, status: str, last_status: str
) -> None:
    answering(monkeypatch, [(Delta("a", "r"), [1]), (CALL, [2])], reason)
    whole, events = await told(ResponseRequest.parse(REQUEST))
    assert whole["status"] == status
    assert [item["status"] for item in whole["output"]] == ["completed", "completed", last_status]
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 3
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == f"response.{status}"
