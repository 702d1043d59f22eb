"""vLLM beside us: its offline engine as a process of its own interpreter, asked the same requests on the same machine.

The peer is never a dependency: a virtual environment of its own, named by `--peer-python` or LOOKONCE_PEER_PYTHON.
Where none is named, scripts say so and measure our side alone. Its engine is asked without HTTP, its fastest form.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import psutil

from benchmarks.forced_level import peer_variables

_WORKER = pathlib.Path(__file__).with_name("peer_worker.py")
_PYTHON_VARIABLE = "LOOKONCE_PEER_PYTHON"
_PRELOAD_VARIABLE = "LOOKONCE_PEER_PRELOAD"
# It compiles for about a minute at every start.
_START_TIMEOUT_S = 400.0
_RUN_TIMEOUT_S = 1200.0
_STOP_TIMEOUT_S = 30.0
_TAIL_LINES = 30
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class PeerError(Exception):
    """The peer did not start, or did not answer; with the end of its log."""


@dataclass(frozen=True, slots=True)
class PeerInstall:
    """The interpreter and the preloaded libraries of the peer's installation."""

    # The interpreter of its virtual environment.
    python: pathlib.Path
    # Value of LD_PRELOAD; vLLM's guide for CPUs asks for tcmalloc and Intel's OpenMP. Empty: none.
    preload: str = ""


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """One request: greedy, with exactly `max_tokens` tokens out."""

    # One placeholder per image, whatever number of rows it has.
    token_ids: tuple[int, ...]
    # Files as a client sends them; decoding them is part of the request.
    images: tuple[bytes, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """One answer. Times are the peer's own, seconds."""

    # Image tokens included.
    num_prompt_tokens: int
    num_cached_tokens: int
    token_ids: tuple[int, ...]
    # From the request's arrival at the engine to its first token.
    first_token_s: float
    # From the first token to the last.
    decode_s: float


@dataclass(frozen=True, slots=True)
class PeerRun:
    """The answers to one set of requests and their total time."""

    # From the first request to the last answer, decoding of images included, seconds.
    duration_s: float
    answers: tuple[PeerAnswer, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that name the peer."""
    parser.add_argument(
        "--peer-python",
        type=pathlib.Path,
        default=os.environ.get(_PYTHON_VARIABLE) or None,
        help=f"interpreter of a virtual environment with vLLM (default: {_PYTHON_VARIABLE}); absent: peer not run",
    )
    parser.add_argument(
        "--peer-preload",
        default=os.environ.get(_PRELOAD_VARIABLE, ""),
        help=f"libraries that the peer loads first, as its guide for CPUs says (default: {_PRELOAD_VARIABLE})",
    )


@contextlib.contextmanager
def all_paused(peers: Iterable[Peer]) -> Iterator[None]:
    """Stops the processes of all peers during the block; see `Peer.paused`."""
    with contextlib.ExitStack() as stack:
        for peer in peers:
            stack.enter_context(peer.paused())
        yield


def named_peer(arguments: argparse.Namespace) -> PeerInstall | None:
    """The peer that the flags name; None, and a line that says so, where they name none.

    Raises PeerError if the named interpreter does not exist.
    """
    if arguments.peer_python is None:
        print("peer: not run (no --peer-python)", flush=True)
        return None
    python = pathlib.Path(arguments.peer_python)
    if not python.is_file():
        raise PeerError(f"--peer-python: {python} is not a file")
    return PeerInstall(python, arguments.peer_preload)


class Peer:
    """One engine of the peer. Entering the block waits until it is ready; it takes one command at a time."""

    def __init__(
        self,
        install: PeerInstall,
        model: pathlib.Path,
        *,
        kv_cache_bytes: int,
        dtype: str = "auto",
        prefix_cache: bool = True,
        max_images: int = 1,
        max_context_tokens: int = 2048,
        cpus: Sequence[int] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`cpus` are the CPUs it may use; empty means all of ours. `options` are further arguments of `vllm.LLM`."""
        self._install = install
        self._cpus = sorted(cpus or os.sched_getaffinity(0))
        self._first: dict[str, Any] = {
            "model": str(model.resolve()),
            "cpus": self._cpus,
            "options": {
                "dtype": dtype,
                "enable_prefix_caching": prefix_cache,
                "kv_cache_memory_bytes": kv_cache_bytes,
                "max_model_len": max_context_tokens,
                "limit_mm_per_prompt": {"image": max_images},
                **(options or {}),
            },
        }
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._log = tempfile.NamedTemporaryFile(prefix="lookonce-peer-", suffix=".log")  # noqa: SIM115
        self._popen: subprocess.Popen[str] | None = None
        # The version that the peer reports.
        self.version = ""
        # From the start of the process until it took requests, seconds.
        self.start_s = 0.0

    def __enter__(self) -> Self:
        """Raises PeerError when it does not start."""
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the process without waiting, so that several can start at once; call `wait_until_ready` next."""
        self._started_s = time.monotonic()
        environment = os.environ | _ENVIRONMENT | peer_variables()
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, self._cpus))
        if self._install.preload:
            environment["LD_PRELOAD"] = self._install.preload
        self._popen = subprocess.Popen(
            [str(self._install.python), str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
            # It starts processes of its own, which are ended with it.
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self._popen,), daemon=True).start()
        self._send(self._first)

    def wait_until_ready(self) -> None:
        """Raises PeerError when it ends, or is not ready in time."""
        self.version = self._receive(_START_TIMEOUT_S)["version"]
        self.start_s = time.monotonic() - self._started_s

    def run(self, requests: Sequence[PeerRequest], *, one_by_one: bool = False) -> PeerRun:
        """Answers all requests, all at once or each after the one before. Raises PeerError."""
        self.begin(requests, one_by_one=one_by_one)
        return self.finish()

    def begin(self, requests: Sequence[PeerRequest], *, one_by_one: bool = False) -> None:
        """Sends the requests; call `finish` for the answers. Several engines can work at the same time."""
        told = [
            {
                "token_ids": request.token_ids,
                "images": [base64.b64encode(image).decode() for image in request.images],
                "max_tokens": request.max_tokens,
            }
            for request in requests
        ]
        self._send({"command": "run", "requests": told, "one_by_one": one_by_one})

    def finish(self) -> PeerRun:
        """Waits for the answers to the requests sent by `begin`."""
        found = self._receive(_RUN_TIMEOUT_S)
        answers = (PeerAnswer(**{**one, "token_ids": tuple(one["token_ids"])}) for one in found["answers"])
        return PeerRun(found["duration_s"], tuple(answers))

    def reset(self) -> None:
        """Empties the prefix cache and the encoder cache."""
        self._send({"command": "reset"})
        self._receive(_RUN_TIMEOUT_S)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the peer's processes during the block, since they poll for a second after each run and use CPU time."""
        assert self._popen is not None, "start() comes first"
        # The peer has its own session and therefore its own process group.
        os.killpg(self._popen.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._popen.pid, signal.SIGCONT)

    def memory_bytes(self) -> int:
        """Returns the memory of its processes in bytes; shared pages count once."""
        assert self._popen is not None, "start() comes first"
        return memory_bytes([self._popen.pid])

    def close(self) -> None:
        """Ends the process, with SIGKILL if it does not end by itself."""
        if self._popen is None:
            return
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        try:
            self._popen.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
        self._log.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._popen is not None, "start() comes first"
        assert self._popen.stdin is not None
        try:
            print(json.dumps(message), file=self._popen.stdin, flush=True)
        except BrokenPipeError:
            raise PeerError(f"the peer has ended:\n{self._log_tail()}") from None

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerError(f"the peer did not answer within {timeout_s:g} s:\n{self._log_tail()}") from None
        if line is None:
            raise PeerError(f"the peer has ended:\n{self._log_tail()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _read(self, popen: subprocess.Popen[str]) -> None:
        assert popen.stdout is not None
        with popen.stdout:
            for line in popen.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _log_tail(self) -> str:
        lines = pathlib.Path(self._log.name).read_text("utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


class PeerPrompts:
    """Builds single-turn prompts like our service, but with one placeholder per image as the peer expects."""

    def __init__(self, model: pathlib.Path) -> None:
        """`model` is a folder with a tokenizer and a chat template."""
        import transformers

        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)

    def request(self, question: str, images: Sequence[bytes], max_tokens: int) -> PeerRequest:
        """Returns the request that the SDK would send for a question after these images."""
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        return PeerRequest(tuple(token_ids), tuple(images), max_tokens)


def memory_bytes(pids: Sequence[int]) -> int:
    """Returns the memory of these processes and their children in bytes; shared pages count once (Linux: PSS)."""
    found = {}
    for pid in pids:
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            found[one.pid] = int(one.memory_full_info().pss)
    return sum(found.values())
