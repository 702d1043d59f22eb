"""`lookonce top` shows states, rates and ratios of replicas, and which of them are away."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from lookonce.commands.replicas import Reading, Replica, encoder_counters
from lookonce.errors import UnavailableError
from lookonce.local.metrics_page import MetricsPage
from lookonce.local.stack_record import StackRecord
from lookonce.server.metrics_endpoint import MetricsEndpoint
from lookonce.testing import FakeServer
from tests.lookonce.command import clean_environment, run_here
from tests.lookonce.commands.conftest import Command
from tests.lookonce.commands.terminal import Terminal

AWAY = "127.0.0.1:1"


@pytest.fixture(scope="module")
def pages() -> Iterator[dict[str, str]]:
    """Addresses of the metrics of a decoder and of an encoder."""
    decoder, encoder = CollectorRegistry(), CollectorRegistry()
    Gauge("lookonce_decoder_running_requests", "Requests.", registry=decoder).set(3)
    Gauge("lookonce_decoder_kv_cache_usage", "Share.", registry=decoder).set(0.5)
    Counter("lookonce_decoder_generated_tokens", "Tokens.", registry=decoder).inc(70)
    rows = Counter("lookonce_decoder_image_rows", "Rows.", ["tier"], registry=decoder)
    for tier, number in (("encoded", 10), ("shared", 20), ("skipped", 10)):
        rows.labels(tier).inc(number)
    queries = Counter("lookonce_encoder_cache_queries", "Look-ups.", ["tier"], registry=encoder)
    hits = Counter("lookonce_encoder_cache_hits", "Hits.", ["tier"], registry=encoder)
    for tier, num_queries, num_hits in (("local", 8, 4), ("shared", 4, 2)):
        queries.labels(tier).inc(num_queries)
        hits.labels(tier).inc(num_hits)
    ends = [MetricsEndpoint("127.0.0.1", 0, registry) for registry in (decoder, encoder)]
    yield dict(zip(("decoder", "encoder"), (f"127.0.0.1:{end.port}" for end in ends), strict=True))
    for end in ends:
        end.stop()


def looked_at(environment: dict[str, str], *arguments: str) -> dict[str, dict[str, Any]]:
    finished = run_here(environment, "top", "--once", "--json", "--interval-s", "0.1", *arguments)
    assert finished.returncode == 0, finished.stderr
    return {one["replica"]: one for one in json.loads(finished.stdout)}


def test_metrics_of_both_services_become_states_rates_and_ratios(pages: dict[str, str], tmp_path: pathlib.Path) -> None:
    asked = [argument for address in (*pages.values(), AWAY) for argument in ("--metrics", address)]
    found = looked_at(clean_environment(tmp_path), *asked)
    decoder, encoder = found[pages["decoder"]], found[pages["encoder"]]
    assert (decoder["kind"], decoder["state"]) == ("decoder", "up")
    assert (decoder["running"], decoder["kv_cache"]) == (3, 0.5)
    assert decoder["generated_tokens_per_s"] == 0
    assert decoder["rows_reused_ratio"] == 0.75
    assert decoder["prefix_hit_ratio"] is None, "there was no look-up"
    assert (encoder["kind"], encoder["hit_ratio"]) == ("encoder", 0.75)
    assert "Connection refused" in found[AWAY]["state"]
    assert found[AWAY]["running"] is None


def test_a_decoder_is_asked_for_its_load(environment: dict[str, str], server: FakeServer) -> None:
    found = looked_at(environment)
    assert found[server.target]["running"] == 0
    assert found[server.target]["generated_tokens_per_s"] is None, "a load has no counters"


def test_without_a_target_it_shows_the_running_stack(pages: dict[str, str], tmp_path: pathlib.Path) -> None:
    environment = clean_environment(tmp_path)
    assert run_here(environment, "top", "--once").returncode == 2
    record = StackRecord(os.getpid(), ("a:1", "a:9"), ("a:2",), "a:3", (pages["decoder"], AWAY), (pages["encoder"],))
    record.write(tmp_path / "lookonce")
    finished = run_here(environment, "top", "--once", "--interval-s", "0.1")
    lines = [line.split("\t") for line in finished.stdout.splitlines()]
    assert [line[:2] for line in lines] == [
        ["kind", "replica"], ["decoder", "a:1"], ["decoder", "a:9"], ["kind", "replica"], ["encoder", "a:2"],
    ]  # fmt: skip
    decoder = dict(zip(lines[0], lines[1], strict=True))
    assert (decoder["state"], decoder["running"], decoder["KV"], decoder["rows reused"]) == ("up", "3", "50%", "75%")
    assert dict(zip(lines[3], lines[4], strict=True))["cache hits"] == "75%"


def test_a_report_without_any_answer_is_a_failure(tmp_path: pathlib.Path) -> None:
    finished = run_here(clean_environment(tmp_path), "top", "--once", "--interval-s", "0.1", "--metrics", AWAY)
    assert finished.returncode == 1
    assert "Connection refused" in finished.stdout


def test_bytes_of_another_server_are_not_shown(tmp_path: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            for _ in range(2):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"\x1b[31m\x00\x00\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        asked = ("--metrics", f"127.0.0.1:{listening.getsockname()[1]}")
        finished = run_here(clean_environment(tmp_path), "top", "--once", "--interval-s", "0.1", *asked)
        answering.join()
    assert finished.returncode == 1
    assert "its answer is not HTTP" in finished.stdout
    assert "\x1b" not in finished.stdout


@pytest.mark.parametrize(
    ("queries", "hits", "answered"),
    [
        ((8, 4), (4, 2), 6),
        ((8, 0), (4, 0), 4),
        # All look-ups ask both caches, which have the same images.
        ((8, 8), (6, 6), 6),
        ((8, 8), (2, 6), 6),
        ((0, 5), (0, 3), 0),
    ],
)
def test_a_lookup_that_both_caches_answer_counts_once(
    queries: tuple[int, int], hits: tuple[int, int], answered: int
) -> None:
    samples = [
        f'lookonce_encoder_cache_{name}_total{{tier="{tier}"}} {number}'
        for name, numbers in (("queries", queries), ("hits", hits))
        for tier, number in zip(("local", "shared"), numbers, strict=True)
    ]
    counters = encoder_counters(MetricsPage("\n".join(samples)))
    assert (counters["lookups"], counters["hits"]) == (queries[0], answered)


def test_a_wrong_target_is_refused(command: Command) -> None:
    for arguments in (["--target", ""], ["--target", "decoder"], ["--metrics", " "]):
        finished = command("top", "--once", *arguments)
        assert (finished.returncode, finished.stdout) == (2, "")


def test_rates_are_those_between_two_looks_of_one_process() -> None:
    readings = iter([
        Reading(1.0, counters={"tokens": 10.0}), Reading(3.0, counters={"tokens": 40.0}),
        Reading(4.0, counters={"tokens": 5.0}), None, Reading(6.0, counters={"tokens": 9.0}),
    ])  # fmt: skip

    def read() -> Reading:
        if (reading := next(readings)) is None:
            raise UnavailableError("away")
        return reading

    replica = Replica("a:1", read)
    found = []
    for _ in range(5):
        replica.look()
        found.append((replica.rate("tokens"), replica.fault))
    assert found == [(None, ""), (15.0, ""), (None, ""), (None, "away"), (None, "")]


def test_on_a_terminal_the_view_goes_on_until_ctrl_c(environment: dict[str, str], server: FakeServer) -> None:
    with contextlib.closing(Terminal(environment, "top", "--interval-s", "0.1", term="xterm")) as terminal:
        for _ in range(3):
            terminal.until(server.target)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(60) == 130
