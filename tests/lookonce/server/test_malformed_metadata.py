"""Metadata that are not UTF-8 cost one short line of the log in a while."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from typing import Any

import pytest

from lookonce.server import malformed_metadata
from lookonce.server.malformed_metadata import MalformedMetadata
from lookonce.server.telemetry import configure_logging
from tests.lookonce.server import raw_calls
from tests.lookonce.server.running_server import ENCODER, running_server

GRPC = "grpc._cython.cygrpc"
BYTES = b"\xff\xfe"


@pytest.mark.parametrize("name", ["x-request-id", "authorization", "any", "traceparent"])
async def test_a_call_with_such_a_header_is_answered_and_its_bytes_are_not_logged(
    name: str, log_lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(malformed_metadata._filter, "_next_s", 0.0)
    async with running_server() as running:
        with await asyncio.to_thread(raw_calls.connect, running.service.target) as connection:
            for stream in (1, 3, 5):
                connection.sendall(raw_calls.call(stream, f"/{ENCODER}/GetEncoderInfo", metadata={name: BYTES}))
                await asyncio.to_thread(raw_calls.wait_until_answered, connection)
    lines = [line for line in log_lines() if line["logger"] == GRPC]
    assert [line["level"] for line in lines] == ["warning"]
    assert "exception" not in lines[0]
    assert "xff" not in json.dumps(lines)


async def test_calls_of_such_a_path_cost_one_line(log_lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malformed_metadata._filter, "_next_s", 0.0)
    async with running_server() as running:
        with await asyncio.to_thread(raw_calls.connect, running.service.target) as connection:
            for stream in (1, 3, 5):
                connection.sendall(raw_calls.call(stream, "/", metadata={":path": b"/" + BYTES}))
                await asyncio.to_thread(raw_calls.wait_until_answered, connection)
        assert await running.health_of("")
    lines = [line for line in log_lines() if line["logger"] == GRPC]
    assert [line["level"] for line in lines] == ["warning"]
    assert "xff" not in json.dumps(lines)


def test_the_next_line_has_the_number_of_values_that_were_not_logged() -> None:
    now_s = 100.0
    one = MalformedMetadata(lambda: now_s)

    def logged() -> str | None:
        record = logging.LogRecord(GRPC, logging.ERROR, "", 0, "Invalid encoding on %s", (BYTES,), None)
        return record.getMessage() if one(record) else None

    assert "1 values" in str(logged())
    assert [logged() for _ in range(4)] == [None] * 4
    now_s += 3600
    assert "5 values" in str(logged())


def test_other_records_of_grpc_stay() -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    logging.getLogger(GRPC).error("a %s", "fault")
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert (line["event"], line["level"]) == ("a fault", "error")
