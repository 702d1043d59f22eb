"""The whole system on this machine: a Redis, encoders and decoders, each a process of its own, for one `with` block.

Used by `lookonce up`, the demo and the end-to-end tests. Not for production: see k8s/.
"""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Self

from lookonce.local.child_process import ChildProcess
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.local.reserved_port import reserved_port

_DRAIN_TIMEOUT_S = 5.0
# Of the memory that is left; all decoders of the machine together.
_KV_CACHE_MEMORY_SHARE = 0.5
# Beyond its drain a process needs time to free the model and to end its threads.
_STOP_MARGIN_S = 10.0


def _ignore(_: str) -> None:
    pass


class LocalStack:
    """Started by entering it, from a thread that lives on (see ChildProcess); everything is stopped on leaving it."""

    def __init__(
        self,
        model: pathlib.Path,
        *,
        redis_url: str | None = None,
        use_environment_redis: bool = False,
        use_redis: bool = True,
        num_encoders: int = 1,
        num_decoders: int = 1,
        decoder_port: int = 0,
        dtype: str = "auto",
        encoder_arguments: Sequence[str] = (),
        decoder_arguments: Sequence[str] = (),
        start_timeout_s: float = 300.0,
        on_progress: Callable[[str], None] = _ignore,
    ) -> None:
        """`redis_url` None starts an embedded server, unless the services' own environment names one and
        `use_environment_redis` says so (a password then shows in no process list). Without `use_redis` there is none,
        and the services' environment must name none.

        `decoder_port` is the first decoder's, 0 a free one; the others always get free ones.
        `*_arguments` are flags of the services; they win over the ones given here. `on_progress` hears what is awaited.
        """
        self._model = model
        self._redis_url = redis_url
        self._starts_redis = use_redis and redis_url is None and not use_environment_redis
        self._num_encoders = num_encoders
        self._decoder_ports = [decoder_port, *[0] * num_decoders][:num_decoders]
        self._dtype = dtype
        self._encoder_arguments = tuple(encoder_arguments)
        self._decoder_arguments = tuple(decoder_arguments)
        self._start_timeout_s = start_timeout_s
        self._on_progress = on_progress
        self._exits = contextlib.ExitStack()
        self._directory = pathlib.Path()
        # Module and flags of each process, by its name.
        self._commands: dict[str, tuple[str, Sequence[str]]] = {}
        self.redis: EmbeddedRedis | None = None
        self.encoders: list[ChildProcess] = []
        self.decoders: list[ChildProcess] = []

    @property
    def encoder_targets(self) -> list[str]:
        """host:port of each encoder."""
        return [process.ready.target for process in self.encoders]

    @property
    def decoder_targets(self) -> list[str]:
        """host:port of each decoder."""
        return [process.ready.target for process in self.decoders]

    @property
    def redis_url(self) -> str | None:
        """URL that was handed to the services; None when they take it from their environment or use none."""
        return self._redis_url if self.redis is None else self.redis.url

    def metric(self, processes: Sequence[ChildProcess], name: str) -> float:
        """Sum of one Prometheus sample over all its labels and over these processes of the stack."""
        return sum(_sample(process.ready.metrics_port, name) for process in processes)

    def failed(self) -> ChildProcess | None:
        """A process that has ended although nobody stopped it."""
        ended = (process for process in [*self.encoders, *self.decoders] if process.returncode is not None)
        return next(ended, None)

    def __enter__(self) -> Self:
        """Raises StartupError with the end of the log of the process that did not start."""
        with contextlib.ExitStack() as exits:
            self._directory = pathlib.Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="lookonce-stack-")))
            deadline_s = time.monotonic() + self._start_timeout_s
            if self._starts_redis:
                self._on_progress("starting Redis")
                self.redis = exits.enter_context(EmbeddedRedis())
            # For as long as the stack lives: a process that is started again takes the address of the one before.
            encoder_ports = [exits.enter_context(reserved_port()) for _ in range(self._num_encoders)]
            decoder_ports = [port or exits.enter_context(reserved_port()) for port in self._decoder_ports]
            exits.callback(self._stop_processes)
            self._on_progress("encoder and decoder load the model")
            self._launch(encoder_ports, decoder_ports)
            for process in [*self.encoders, *self.decoders]:
                process.wait_until_ready(deadline_s)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def restart(self, process: ChildProcess) -> ChildProcess:
        """Launches a process that has ended again, with its flags at its address, and takes the new one in its place.

        Whoever calls waits until it is ready. Call it from a thread that lives on.
        """
        assert process.returncode is not None, "its address is free once it has ended"
        module, arguments = self._commands[process.name]
        restarted = ChildProcess(process.name, module, arguments, self._directory)
        for processes in (self.encoders, self.decoders):
            processes[:] = [restarted if one is process else one for one in processes]
        return restarted

    def _launch(self, encoder_ports: Sequence[int], decoder_ports: Sequence[int]) -> None:
        """Starts all processes side by side: most of the time goes into loading libraries and models."""
        addresses = [f"127.0.0.1:{port}" for port in encoder_ports]
        for index, address in enumerate(addresses):
            arguments = [*self._shared_arguments(), "--listen", address, "--admin-listen", "127.0.0.1:0"]
            arguments += self._encoder_arguments
            self.encoders.append(self._launched(f"encoder-{index}", "encoder_svc", arguments))
        arguments = self._shared_arguments()
        if addresses:
            arguments += ["--encoder-target", f"ipv4:{','.join(addresses)}"]
        arguments += ["--kv-cache-memory-share", f"{_KV_CACHE_MEMORY_SHARE / max(1, len(decoder_ports)):g}"]
        for index, port in enumerate(decoder_ports):
            arguments = [*arguments, "--listen", f"127.0.0.1:{port}", *self._decoder_arguments]
            self.decoders.append(self._launched(f"decoder-{index}", "decoder_svc", arguments))

    def _launched(self, name: str, module: str, arguments: Sequence[str]) -> ChildProcess:
        self._commands[name] = module, arguments
        return ChildProcess(name, module, arguments, self._directory)

    def _shared_arguments(self) -> list[str]:
        arguments = ["--model", str(self._model), "--dtype", self._dtype]
        arguments += ["--metrics-listen", "127.0.0.1:0"]
        arguments += ["--drain-timeout-s", str(_DRAIN_TIMEOUT_S)]
        if self.redis_url is not None:
            arguments += ["--redis-url", self.redis_url]
        return arguments

    def _stop_processes(self) -> None:
        """Decoders first: what they still answer may need an encoder."""
        for processes in (self.decoders, self.encoders):
            for process in processes:
                process.terminate()
            for process in processes:
                process.stop(_DRAIN_TIMEOUT_S + _STOP_MARGIN_S)


def _sample(port: int | None, name: str) -> float:
    if port is None:
        return 0.0
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)
