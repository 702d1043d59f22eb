"""Ranks on machines of their own, which are processes with nothing in common with the decoder's: its port and a key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import Pipe

import grpc
import psutil
import pytest
from safetensors.torch import load_file, save_file

from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.decoder.v1.decoder_service_pb2_grpc import DecoderServiceStub
from lookonce.process.bound_process import start_bound_process
from tests.conftest import DEMO_MODEL
from tests.decoder_svc import hanging_rank
from tests.decoder_svc.decoders import code_of, params, running_decoder
from tests.warm_processes import WarmProcess, WarmProcesses

TIMEOUT_S = 120
TEXT = "What is in the picture? A green star, and nothing more than that, I am sure. " * 4
QUESTIONS = [
    pb.GenerateRequest(params=params(TEXT[:length], temperature=temperature, seed=3, max_tokens=12, min_tokens=12))
    for length, temperature in ((20, 0.0), (200, 0.0), (310, 0.9))
]


@dataclass
class Machines:
    """A decoder and its ranks, each with a log."""

    processes: WarmProcesses
    folder: pathlib.Path
    started: list[WarmProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.key_file = self.folder / "key"
        self.key_file.write_text("5a" * 32)
        self.ready_file, self.log = self.folder / "ready.json", self.folder / "decoder.log"

    def start_decoder(self, size: int, port: int = 0, *flags: str) -> WarmProcess:
        self.ready_file.unlink(missing_ok=True)
        self.log.write_text("")
        listen = ["--listen", "127.0.0.1:0", "--rank-listen", f"127.0.0.1:{port}"]
        split = ["--tensor-parallel-size", str(size), "--rank-key-file", str(self.key_file)]
        sizes = ["--num-threads", "1", "--num-kv-blocks", "2000", "--dtype", "float32"]
        arguments = ["--model", str(DEMO_MODEL), "--ready-file", str(self.ready_file), *listen, *split, *sizes, *flags]
        return self._started("decoder_svc", arguments, self.log)

    def start_rank(
        self, port: int, name: str, *, model: pathlib.Path = DEMO_MODEL, key_file: pathlib.Path | None = None
    ) -> WarmProcess:
        leader = ["--leader", f"127.0.0.1:{port}", "--rank-key-file", str(key_file or self.key_file)]
        arguments = ["--model", str(model), "--num-threads", "1", *leader]
        return self._started("decoder_svc.remote_rank", arguments, self.log_of(name))

    def _started(self, module: str, arguments: list[str], log: pathlib.Path) -> WarmProcess:
        process = self.processes.start(module, arguments, log)
        self.started.append(process)
        return process

    def log_of(self, name: str) -> pathlib.Path:
        return self.folder / f"{name}.log"

    def port(self) -> int:
        """Waits until the decoder listens for ranks, and returns the port."""
        return int(self.logged(self.log, r"waiting for ranks on port (\d+)")[1])

    def logged(self, log: pathlib.Path, pattern: str) -> re.Match[str]:
        """Waits until a log has this text."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (log.exists() and (found := re.search(pattern, log.read_text()))):
            assert time.monotonic() < deadline_s, f"{pattern} is not in {log.read_text() if log.exists() else log}"
            time.sleep(0.02)
        return found

    @contextlib.contextmanager
    def stub(self) -> Iterator[DecoderServiceStub]:
        """Waits until the decoder is ready, and yields a stub for it."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self.ready_file.exists():
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.02)
        with grpc.insecure_channel(json.loads(self.ready_file.read_text())["target"]) as channel:
            yield DecoderServiceStub(channel)

    def answers(self) -> list[list[int]]:
        with self.stub() as stub:
            found = [stub.Generate(question, timeout=TIMEOUT_S) for question in QUESTIONS]
        return [list(one.choices[0].token_ids) for one in found]


@pytest.fixture
def machines(tmp_path: pathlib.Path, warm_processes: WarmProcesses) -> Iterator[Machines]:
    found = Machines(warm_processes, tmp_path)
    yield found
    engines = [child for one in found.started for child in children_of(one)]
    for process in found.started:
        process.kill()
        process.wait(TIMEOUT_S)
    psutil.wait_procs(engines, TIMEOUT_S)


def children_of(process: WarmProcess) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The answers of one process."""

    async def answers() -> list[list[int]]:
        async with running_decoder(DEMO_MODEL, dtype="float32") as decoder:
            found = [await decoder.stub.Generate(question, timeout=TIMEOUT_S) for question in QUESTIONS]
            return [list(one.choices[0].token_ids) for one in found]

    return asyncio.run(answers())


@pytest.mark.parametrize("size", [2, 4])
def test_answers_are_those_of_one_process(size: int, machines: Machines, expected: list[list[int]]) -> None:
    machines.start_decoder(size)
    port = machines.port()
    for number in range(size - 1):
        machines.start_rank(port, f"rank {number}")
    assert machines.answers() == expected


def test_a_rank_may_start_before_the_decoder(machines: Machines, expected: list[list[int]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    machines.start_rank(port, "rank")
    machines.logged(machines.log_of("rank"), "is not there yet")
    machines.start_decoder(2, port)
    assert machines.answers() == expected


def another_key(machines: Machines) -> dict[str, pathlib.Path]:
    (machines.folder / "other").write_text("a5" * 32)
    return {"key_file": machines.folder / "other"}


def another_model(machines: Machines) -> dict[str, pathlib.Path]:
    folder = shutil.copytree(DEMO_MODEL, machines.folder / "model")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    save_file({**tensors, name: tensors[name] * 1.01}, folder / "model.safetensors", metadata={"format": "pt"})
    return {"model": folder}


@pytest.mark.parametrize(
    ("differing", "reason"),
    [(another_key, "the decoder has another key"), (another_model, "another config.json or other weights")],
)
def test_a_rank_of_something_else_is_refused_and_takes_no_place(
    differing: Callable[[Machines], dict[str, pathlib.Path]],
    reason: str,
    machines: Machines,
    expected: list[list[int]],
) -> None:
    machines.start_decoder(2)
    port = machines.port()
    refused = machines.start_rank(port, "refused", **differing(machines))
    assert refused.wait(TIMEOUT_S) == 1
    assert reason in machines.log_of("refused").read_text()
    machines.logged(machines.log, "is no rank of this decoder")
    assert not machines.ready_file.exists()
    machines.start_rank(port, "rank")
    assert machines.answers() == expected


def test_strangers_do_not_hold_ranks_up(machines: Machines, expected: list[list[int]]) -> None:
    machines.start_decoder(2)
    address = ("127.0.0.1", machines.port())
    with contextlib.ExitStack() as strangers:
        for data in [b"", b"GET / HTTP/1.1\r\n\r\n", (1 << 20).to_bytes(4, "big"), b"\x00" * 5000] * 5:
            stranger = strangers.enter_context(socket.create_connection(address))
            with contextlib.suppress(OSError):
                stranger.sendall(data)
        machines.start_rank(address[1], "rank")
        assert machines.answers() == expected
    # Once all ranks have come, nobody listens any more.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_a_rank_that_goes_before_all_have_come_gives_its_place(machines: Machines, expected: list[list[int]]) -> None:
    machines.start_decoder(4)
    port = machines.port()
    first = machines.start_rank(port, "first")
    machines.logged(machines.log, "1 of 3")
    first.terminate()
    assert first.wait(TIMEOUT_S) == -signal.SIGTERM, "nobody needs it yet"
    machines.logged(machines.log, "has gone before all had come")
    for number in range(3):
        machines.start_rank(port, f"rank {number}")
    assert machines.answers() == expected


def test_a_rank_waits_for_the_next_decoder_if_one_ends_before_all_have_come(
    machines: Machines, expected: list[list[int]]
) -> None:
    decoder = machines.start_decoder(4)
    port = machines.port()
    machines.start_rank(port, "rank")
    machines.logged(machines.log, "1 of 3")
    decoder.kill()
    decoder.wait(TIMEOUT_S)
    machines.logged(machines.log_of("rank"), "has gone before all ranks had come")
    machines.start_decoder(2, port)
    assert machines.answers() == expected


@pytest.mark.parametrize("is_busy", [True, False], ids=["in a step", "without work"])
def test_a_rank_that_ends_ends_the_decoder_and_the_other_ranks(is_busy: bool, machines: Machines) -> None:
    decoder = machines.start_decoder(4)
    port = machines.port()
    ranks = [machines.start_rank(port, f"rank {number}") for number in range(3)]
    request = pb.GenerateRequest(params=params("red", max_tokens=1500, ignore_eos=True))
    with machines.stub() as stub, ThreadPoolExecutor(4) as threads:
        calls = [
            threads.submit(code_of, lambda: stub.Generate(request, timeout=TIMEOUT_S))
            for _ in range(4 if is_busy else 0)
        ]
        while is_busy and stub.GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S).running_requests < 4:
            time.sleep(0.01)
        ranks[1].kill()
        assert {call.result() for call in calls} <= {"UNAVAILABLE"}
    assert decoder.wait(TIMEOUT_S) == 1
    for rank in (ranks[0], ranks[2]):
        assert rank.wait(TIMEOUT_S) in (0, 1)


def test_the_ranks_end_with_a_decoder_that_is_killed(machines: Machines) -> None:
    decoder = machines.start_decoder(2)
    rank = machines.start_rank(machines.port(), "rank")
    with machines.stub():
        decoder.kill()
        decoder.wait(TIMEOUT_S)
    assert rank.wait(TIMEOUT_S) in (0, 1)


def test_a_rank_that_hangs_in_a_step_ends_with_the_decoder() -> None:
    """A GPU waits for a lost rank for ever, and the host for the GPU."""
    ours, theirs = Pipe()
    with theirs:
        process = start_bound_process(hanging_rank.__name__, [str(theirs.fileno())], [theirs.fileno()])
    assert ours.recv_bytes() == b"hangs"
    assert process.poll() is None
    ours.close()
    assert process.wait(TIMEOUT_S) == 1


def test_ranks_that_are_told_to_end_wait_until_the_decoder_has_drained(machines: Machines) -> None:
    decoder = machines.start_decoder(2, 0, "--drain-timeout-s", "100")
    rank = machines.start_rank(machines.port(), "rank")
    request = pb.GenerateRequest(params=params("red", max_tokens=1500, ignore_eos=True))
    with machines.stub() as stub, ThreadPoolExecutor(1) as threads:
        call = threads.submit(lambda: stub.Generate(request, timeout=TIMEOUT_S))
        while not stub.GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S).running_requests:
            time.sleep(0.01)
        rank.terminate()
        decoder.terminate()
        assert len(call.result().choices[0].token_ids) == 1500
    assert decoder.wait(TIMEOUT_S) == 0
    assert rank.wait(TIMEOUT_S) == 0
    assert "goes on until the decoder has ended" in machines.log_of("rank").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_for_the_decoder_is_ended_by_a_signal(number: int, machines: Machines) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    rank = machines.start_rank(port, "rank")
    machines.logged(machines.log_of("rank"), "not there yet")
    rank.send_signal(number)
    assert rank.wait(TIMEOUT_S) == -number
    assert "Traceback" not in machines.log_of("rank").read_text()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--leader", "127.0.0.1:0"], "which is not 0"),
        (["--leader", "nowhere"], "must be host:port"),
        (["--rank-key-file", "/nowhere"], "rank_key_file: /nowhere must be readable"),
        (["--model", "/nowhere"], "is not a folder"),
    ],
    ids=str,
)
def test_wrong_settings_of_a_rank_are_refused_at_once(flags: list[str], reason: str, machines: Machines) -> None:
    good = {"--model": str(DEMO_MODEL), "--leader": "127.0.0.1:9", "--rank-key-file": str(machines.key_file)}
    arguments = [part for pair in {**good, flags[0]: flags[1]}.items() for part in pair]
    log = machines.log_of("rank")
    assert machines._started("decoder_svc.remote_rank", arguments, log).wait(TIMEOUT_S) == 2
    assert reason in log.read_text()
