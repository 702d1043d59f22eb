"""An engine that dies or hangs, in a service as operators run it: health and the answers of the calls."""

from __future__ import annotations

import json
import pathlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.decoder.v1.decoder_service_pb2_grpc import DecoderServiceStub
from tests.decoder_svc.decoders import code_of, params
from tests.fault_file import DIE, FAIL, HANG, FaultFile
from tests.warm_processes import WarmProcess, WarmProcesses

Health = health_pb2.HealthCheckResponse
NUM_CALLS = 4
# Flags for one request in a step, so that the others wait.
SMALL = ("--num-threads", "1", "--num-kv-blocks", "20", "--max-context-tokens", "300", "--max-num-seqs", "1")
TIMEOUT_S = 60


class Decoder:
    """A decoder process with its log, a fault file, and a channel to it."""

    def __init__(self, process: WarmProcess, log: pathlib.Path, fault: FaultFile, channel: grpc.Channel) -> None:
        self.process = process
        self.log = log
        self.fault = fault
        self.stub: DecoderServiceStub = DecoderServiceStub(channel)
        watching = health_pb2.HealthCheckRequest(service="lookonce.decoder.v1.DecoderService")
        self._states: Any = health_pb2_grpc.HealthStub(channel).Watch(watching, timeout=TIMEOUT_S)

    def next_health(self) -> Any:
        """Waits for the next health state, as a load balancer receives it."""
        return next(self._states).status

    def generate(self) -> pb.GenerateResponse:
        request = pb.GenerateRequest(params=params("zebra", max_tokens=3, ignore_eos=True))
        return self.stub.Generate(request, timeout=TIMEOUT_S)

    def until_live(self, num_requests: int) -> None:
        """Waits until the engine has `num_requests` requests without an answer."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            load = self.stub.GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S)
            if load.running_requests + load.waiting_requests == num_requests:
                return
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


Started = Callable[..., AbstractContextManager[Decoder]]


@pytest.fixture
def started(
    model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, warm_processes: WarmProcesses
) -> Started:
    """`started(*flags)` is a block with a running decoder."""

    @contextmanager
    def start(*flags: str) -> Iterator[Decoder]:
        ready_file, fault_path, log = (tmp_path / name for name in ("ready.json", "fault", "log"))
        arguments = [str(fault_path), "--model", str(model_folder("llava_clip")), "--ready-file", str(ready_file)]
        process = warm_processes.start("tests.decoder_svc.faulty_program", [*arguments, *SMALL, *flags], log)
        try:
            while not ready_file.exists():
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            with grpc.insecure_channel(json.loads(ready_file.read_text())["target"]) as channel:
                decoder = Decoder(process, log, FaultFile(fault_path), channel)
                assert decoder.next_health() == Health.SERVING
                yield decoder
        finally:
            process.kill()
            process.wait()

    return start


@pytest.mark.parametrize(
    ("engine", "fault", "expected"),
    # Requests whose own step fails get INTERNAL. After three such steps the engine dies.
    [
        ("thread", DIE, {"UNAVAILABLE": NUM_CALLS}),
        ("thread", FAIL, {"INTERNAL": 3, "UNAVAILABLE": NUM_CALLS - 3}),
        ("process", FAIL, {"INTERNAL": 3, "UNAVAILABLE": NUM_CALLS - 3}),
    ],
)
def test_a_dead_engine_answers_all_calls_is_not_serving_and_ends_the_process_with_1(
    engine: str, fault: str, expected: dict[str, int], started: Started
) -> None:
    with started("--engine", engine) as decoder, ThreadPoolExecutor(NUM_CALLS) as threads:
        decoder.fault.order(HANG)
        calls = [threads.submit(code_of, decoder.generate) for _ in range(NUM_CALLS)]
        decoder.until_live(NUM_CALLS)
        decoder.fault.order(fault)
        assert Counter(call.result() for call in calls) == expected
        assert decoder.next_health() == Health.NOT_SERVING
        assert decoder.process.wait(TIMEOUT_S) == 1
        events = [json.loads(line)["event"] for line in decoder.log.read_text().splitlines()]
        assert "the engine stopped" in events
        assert events[-1] == "the service failed"


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_step_that_hangs_makes_health_say_not_serving_until_it_ends(engine: str, started: Started) -> None:
    with started("--max-step-s", "0.5", "--engine", engine) as decoder, ThreadPoolExecutor(1) as threads:
        decoder.fault.order(HANG)
        call = threads.submit(decoder.generate)
        assert decoder.next_health() == Health.NOT_SERVING
        assert code_of(decoder.generate) == "UNAVAILABLE", "nothing more is taken meanwhile"
        assert decoder.process.poll() is None
        decoder.fault.clear()
        assert call.result().usage.completion_tokens == 3
        assert decoder.next_health() == Health.SERVING
        assert code_of(decoder.generate) == "OK"
        decoder.process.send_signal(signal.SIGTERM)
        assert decoder.process.wait(TIMEOUT_S) == 0


def test_the_engine_s_process_ends_with_a_decoder_that_is_killed_also_in_a_step_that_hangs(started: Started) -> None:
    with started("--engine", "process") as decoder, ThreadPoolExecutor(1) as threads:
        decoder.fault.order(HANG)
        call = threads.submit(code_of, decoder.generate)
        decoder.until_live(1)
        (engine,) = psutil.Process(decoder.process.pid).children()
        decoder.process.kill()
        assert call.result() == "UNAVAILABLE"
        engine.wait(TIMEOUT_S)
        assert not psutil.pid_exists(engine.pid)


def test_an_engine_process_that_dies_while_the_decoder_drains_is_a_fault(started: Started) -> None:
    with started("--engine", "process", "--drain-timeout-s", "60") as decoder, ThreadPoolExecutor(1) as threads:
        decoder.fault.order(HANG)
        call = threads.submit(code_of, decoder.generate)
        decoder.until_live(1)
        (engine,) = psutil.Process(decoder.process.pid).children()
        decoder.process.send_signal(signal.SIGTERM)
        assert decoder.next_health() == Health.NOT_SERVING
        engine.kill()
        assert call.result() == "UNAVAILABLE"
        assert decoder.process.wait(TIMEOUT_S) == 1
