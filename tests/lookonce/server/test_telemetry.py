"""Logs, request ids and the metrics endpoint."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from prometheus_client import Counter

from lookonce.errors import ConfigurationError
from lookonce.logs import configure_plainly
from lookonce.server.settings import ServiceSettings
from lookonce.server.telemetry import (
    Telemetry,
    accept_request_id,
    bind_request_id,
    configure_logging,
    current_request_id,
    replace_request_id,
)


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Restores the process' logging after a test."""
    yield
    configure_plainly()
    structlog.contextvars.clear_contextvars()
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if handler.name == "lookonce"]:
        root.removeHandler(handler)


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object_with_level_time_and_logger() -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    structlog.get_logger("encoder_svc.cache.pipeline").info("stored", num_rows=16)
    (line,) = _lines(stream)
    assert (line["event"], line["num_rows"], line["level"]) == ("stored", 16, "info")
    assert line["logger"] == "encoder_svc.cache.pipeline"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", line["timestamp"])


def test_standard_library_loggers_share_the_pipeline() -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    logging.getLogger("some.library").warning("old %s", "checkpoint")
    logging.getLogger("lookonce.store.embedding_store").info("reconnected")
    assert [line["event"] for line in _lines(stream)] == ["old checkpoint", "reconnected"]


def test_a_library_that_came_with_a_handler_of_its_own_joins_the_pipeline() -> None:
    logger, own = logging.getLogger("transformers"), io.StringIO()
    handlers, propagates = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [logging.StreamHandler(own)], False
    stream = io.StringIO()
    try:
        configure_logging("json", "info", stream)
        logging.getLogger("transformers.modeling").warning("once")
    finally:
        logger.handlers, logger.propagate = handlers, propagates
    assert [line["event"] for line in _lines(stream)] == ["once"]
    assert own.getvalue() == ""


def test_the_level_holds_for_our_loggers_and_libraries_speak_from_warnings_on() -> None:
    stream = io.StringIO()
    configure_logging("json", "debug", stream)
    logging.getLogger("decoder_svc.engine.engine").debug("ours")
    logging.getLogger("asyncio").info("theirs")
    configure_logging("json", "error", stream)
    logging.getLogger("decoder_svc.engine.engine").warning("too quiet now")
    assert [line["event"] for line in _lines(stream)] == ["ours"]


def test_audit_lines_are_logged_at_any_level() -> None:
    stream = io.StringIO()
    configure_logging("json", "error", stream)
    logging.getLogger("lookonce.audit").info("a cache was emptied")
    assert [line["event"] for line in _lines(stream)] == ["a cache was emptied"]


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_tracebacks_are_logged_without_local_variables(log_format: Any) -> None:
    stream = io.StringIO()
    configure_logging(log_format, "info", stream)
    try:
        _fail_over("".join(reversed("tpmorp etavirp")))
    except ValueError:
        structlog.get_logger("lookonce.test").exception("failed")
    assert "ValueError: out of luck" in stream.getvalue()
    assert "Traceback" in stream.getvalue()
    assert "private prompt" not in stream.getvalue()


def _fail_over(prompt: str) -> None:
    assert prompt
    raise ValueError("out of luck")


def test_configuring_again_replaces_the_former_setup() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("json", "info", first)
    configure_logging("json", "info", second)
    logging.getLogger("lookonce").info("once")
    assert first.getvalue() == ""
    assert len(_lines(second)) == 1


async def test_a_request_id_is_on_the_lines_of_its_task_only() -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)

    async def serve(request_id: str) -> None:
        bind_request_id(request_id)
        await asyncio.sleep(0)
        assert current_request_id() == request_id
        structlog.get_logger("lookonce.test").info("served", expected=request_id)

    await asyncio.gather(*(asyncio.create_task(serve(f"r{number}")) for number in range(5)))
    assert current_request_id() is None
    assert all(line["request_id"] == line["expected"] for line in _lines(stream))


@pytest.mark.parametrize("offered", [None, "", "x" * 129, "new\nline", "sp ace", "ünï"])
def test_an_unusable_request_id_is_replaced(offered: str | None) -> None:
    assert re.fullmatch(r"[0-9a-f]{32}", accept_request_id(offered))


@pytest.mark.parametrize("offered", ["Turn-7.b_c", "order:17", "x" * 128])
def test_a_usable_request_id_is_kept(offered: str) -> None:
    assert accept_request_id(offered) == offered


async def test_a_request_with_an_id_of_its_own_has_it_on_its_lines_beside_that_of_the_call() -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)

    async def serve() -> None:
        bind_request_id("call")
        for request_id in ("call", "own"):
            replace_request_id(request_id)
            structlog.get_logger("lookonce.test").info("served")

    await asyncio.create_task(serve())
    kept, replaced = _lines(stream)
    assert (kept["request_id"], "call_id" in kept) == ("call", False)
    assert (replaced["request_id"], replaced["call_id"]) == ("own", "call")


def test_the_endpoint_serves_the_registry_until_it_is_stopped() -> None:
    values: dict[str, Any] = {"model": ".", "metrics_listen": "127.0.0.1:0"}
    settings = ServiceSettings(**values)
    telemetry = Telemetry.from_settings(settings)
    Counter("lookonce_test_things", "Things.", registry=telemetry.registry).inc(3)
    assert telemetry.metrics_port is None
    telemetry.start_endpoint()
    url = f"http://127.0.0.1:{telemetry.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=5) as response:
        text = response.read().decode()
    assert "lookonce_test_things_total 3.0" in text
    assert "process_resident_memory_bytes" in text
    telemetry.stop_endpoint()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=5)


def test_without_an_address_there_is_no_endpoint() -> None:
    telemetry = Telemetry()
    telemetry.start_endpoint()
    assert telemetry.metrics_port is None
    telemetry.stop_endpoint()


def test_a_taken_metrics_port_is_a_configuration_error() -> None:
    first = Telemetry("127.0.0.1:0")
    first.start_endpoint()
    with pytest.raises(ConfigurationError, match="--metrics-listen"):
        Telemetry(f"127.0.0.1:{first.metrics_port}").start_endpoint()
    first.stop_endpoint()
