"""An encoder that cannot be reached leaves one line in the log, and one when it answers again."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from decoder_svc.rows.reach_log import ReachLog
from lookonce.errors import LookonceError, UnavailableError
from lookonce.local.reserved_port import reserved_port
from tests.decoder_svc.encoders import client, running_encoder

FAILED, AGAIN = "encoder call failed", "the encoder service answers again"


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def failure(code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="nobody")


def events(lines: Any) -> list[tuple[str, str]]:
    return [(line["event"], line["log_level"]) for line in lines if line["log_level"] != "debug"]


def test_changes_are_logged_and_repetitions_are_not() -> None:
    clock = Clock()
    reach = ReachLog(clock)
    with capture_logs() as lines:
        reach.note_answer()
        for _ in range(5):
            assert isinstance(reach.error_of(failure(), 3.0), UnavailableError)
        reach.note_answer()
        reach.note_answer()
    assert events(lines) == [(FAILED, "warning"), (AGAIN, "info")]


def test_a_state_that_flaps_leaves_a_line_in_ten_seconds() -> None:
    clock = Clock()
    reach = ReachLog(clock)
    with capture_logs() as lines:
        for _ in range(50):
            reach.error_of(failure(), 3.0)
            reach.error_of(failure(grpc.StatusCode.DEADLINE_EXCEEDED), 3.0)
            reach.note_answer()
        assert events(lines) == [(FAILED, "warning"), (AGAIN, "info")]
        clock.now_s += 10
        reach.error_of(failure(), 3.0)
    assert events(lines)[2:] == [(FAILED, "warning")]


def test_a_change_to_another_code_is_logged_and_an_expected_failure_is_not() -> None:
    clock = Clock()
    reach = ReachLog(clock)
    with capture_logs() as lines:
        reach.error_of(failure(), 3.0, is_expected=True)
        reach.error_of(failure(), 3.0)
        clock.now_s += 10
        reach.error_of(failure(grpc.StatusCode.DEADLINE_EXCEEDED), 3.0)
    assert [line["code"] for line in lines if line["log_level"] == "warning"] == ["UNAVAILABLE", "DEADLINE_EXCEEDED"]


async def test_a_client_logs_that_the_encoder_went_and_came(model_folder: Callable[[str], pathlib.Path]) -> None:
    with reserved_port() as port, capture_logs() as lines:
        async with client(f"127.0.0.1:{port}") as encoder:
            for _ in range(5):
                with pytest.raises(LookonceError):
                    await encoder.info()
            assert events(lines) == [(FAILED, "warning")]
            async with running_encoder(model_folder("llava_clip"), listen=f"127.0.0.1:{port}"):
                for _ in range(100):
                    with contextlib.suppress(UnavailableError):
                        await encoder.info()
                        break
                    await asyncio.sleep(0.1)
    assert [event for event in events(lines) if event[0] in (FAILED, AGAIN)] == [(FAILED, "warning"), (AGAIN, "info")]
