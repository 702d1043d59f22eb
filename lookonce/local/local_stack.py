"""Runs the system on this machine inside a `with` block: Redis, encoders, decoders and a gateway, each in a process.

Used by `lookonce up`, the demo and the end-to-end tests. Not for production: see k8s/.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Self

from lookonce.local.child_process import ChildProcess
from lookonce.local.metrics_page import read_metrics
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.local.reserved_port import reserved_port

# Longest time until all processes are ready, seconds. A model of several gigabytes on a slow disk takes minutes.
START_TIMEOUT_S = 300.0
_DRAIN_TIMEOUT_S = 5.0
_DRAIN = ["--drain-timeout-s", str(_DRAIN_TIMEOUT_S)]
# Share of the free memory for the KV caches of all decoders together.
_KV_CACHE_MEMORY_SHARE = 0.5
# After draining, a process needs time to free the model and to end its threads.
_STOP_MARGIN_S = 10.0


def _ignore(_: str) -> None:
    pass


class RedisSource(enum.Enum):
    """The origin of a stack's Redis if no URL is given."""

    # The stack starts an embedded server.
    EMBEDDED = "embedded"
    # The services read the URL from their environment, which keeps its password out of process lists.
    ENVIRONMENT = "environment"
    # The system has no Redis. The environment must not name one.
    NONE = "none"


class LocalStack:
    """A context manager that starts all processes on entry and stops them on exit.

    Enter it from a long-lived thread, since the processes end with the thread that starts them (see ChildProcess).
    """

    def __init__(
        self,
        model: pathlib.Path,
        *,
        redis: RedisSource | str = RedisSource.EMBEDDED,
        num_encoders: int = 1,
        num_decoders: int = 1,
        decoder_port: int = 0,
        dtype: str = "auto",
        device: str = "auto",
        encoder_arguments: Sequence[str] = (),
        decoder_arguments: Sequence[str] = (),
        has_playground: bool = False,
        on_progress: Callable[[str], None] = _ignore,
    ) -> None:
        """`redis` is a URL or the origin of the server.

        `decoder_port` is the port of the first decoder, 0 for a free one; other decoders always get free ports.
        `*_arguments` are flags of the services; they override those set here. With `has_playground`, a gateway serves
        the playground. `on_progress` is called with the name of each stage.
        """
        self._model = model
        self._redis = redis
        self._num_encoders = num_encoders
        self._decoder_ports = [decoder_port, *[0] * num_decoders][:num_decoders]
        self._dtype = dtype
        self._device = device
        self._encoder_arguments = tuple(encoder_arguments)
        self._decoder_arguments = tuple(decoder_arguments)
        self._has_playground = has_playground
        self._on_progress = on_progress
        # Closed when the stack stops.
        self._exits = contextlib.ExitStack()
        self._directory = pathlib.Path()
        # Module and flags of each process, by the process' name.
        self._commands: dict[str, tuple[str, Sequence[str]]] = {}
        self.redis: EmbeddedRedis | None = None
        self.encoders: list[ChildProcess] = []
        self.decoders: list[ChildProcess] = []
        # At most one.
        self.gateways: list[ChildProcess] = []

    @property
    def encoder_targets(self) -> list[str]:
        """Addresses of the encoders, host:port."""
        return [process.ready.target for process in self.encoders]

    @property
    def decoder_targets(self) -> list[str]:
        """Addresses of the decoders, host:port."""
        return [process.ready.target for process in self.decoders]

    @property
    def services(self) -> list[ChildProcess]:
        """All encoders, decoders and gateways."""
        return [*self.encoders, *self.decoders, *self.gateways]

    @property
    def redis_url(self) -> str | None:
        """The Redis URL given to the services; None if they read it from their environment or use no Redis."""
        if self.redis is not None:
            return self.redis.url
        return self._redis if isinstance(self._redis, str) else None

    def metric(self, processes: Sequence[ChildProcess], name: str) -> float:
        """Returns the sum of one Prometheus metric over its labels and over `processes`."""
        ports = (process.ready.metrics_port for process in processes)
        return sum(read_metrics(f"127.0.0.1:{port}").total(name) for port in ports if port is not None)

    def __enter__(self) -> Self:
        """Starts everything. Raises StartupError with the end of the log of a process that did not start.

        Before anything starts, raises ConfigurationError if another program listens on `decoder_port`.
        """
        with contextlib.ExitStack() as exits:
            # Reserved until the stack stops, so that a restarted process gets its old addresses.
            reserve = functools.partial(_reserved_address, exits)
            decoder_addresses = [reserve(port) for port in self._decoder_ports]
            encoder_addresses = [reserve() for _ in range(self._num_encoders)]
            self._directory = pathlib.Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="lookonce-stack-")))
            deadline_s = time.monotonic() + START_TIMEOUT_S
            if self._redis is RedisSource.EMBEDDED:
                self._on_progress("starting Redis")
                self.redis = exits.enter_context(EmbeddedRedis())
            exits.callback(self._stop_processes)
            self._on_progress("loading the model in encoder and decoder")
            self._launch(encoder_addresses, decoder_addresses, reserve)
            for process in self.services:
                process.wait_until_ready(deadline_s)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def restart(self, process: ChildProcess) -> ChildProcess:
        """Starts an ended process again with the same flags and addresses; returns the new process.

        The new process replaces the old one in its list. The caller waits for its readiness. Call it from a long-lived
        thread.
        """
        assert process.returncode is not None, "the address is in use until the process has ended"
        module, arguments = self._commands[process.name]
        restarted = ChildProcess(process.name, module, arguments, self._directory)
        for processes in (self.encoders, self.decoders, self.gateways):
            processes[:] = [restarted if one is process else one for one in processes]
        return restarted

    def _launch(self, encoders: Sequence[str], decoders: Sequence[str], reserve: Callable[[], str]) -> None:
        """Starts all processes at once, since each spends most of its start on loading libraries and the model."""
        for index, address in enumerate(encoders):
            arguments = [*self._shared_arguments(address, reserve(), reserve()), *self._encoder_arguments]
            self.encoders.append(self._launched(f"encoder-{index}", "encoder_svc", arguments))
        targets = ["--encoder-target", f"ipv4:{','.join(encoders)}"] if encoders else []
        share = ["--kv-cache-memory-share", f"{_KV_CACHE_MEMORY_SHARE / max(1, len(decoders)):g}"]
        for index, address in enumerate(decoders):
            arguments = self._shared_arguments(address, reserve(), reserve())
            arguments += [*targets, *share, *self._decoder_arguments]
            self.decoders.append(self._launched(f"decoder-{index}", "decoder_svc", arguments))
        if self._has_playground:
            arguments = ["--listen", reserve(), "--metrics-listen", reserve(), "--playground"]
            arguments += ["--decoder-target", f"ipv4:{','.join(decoders)}", *_DRAIN]
            self.gateways.append(self._launched("gateway", "gateway_svc", arguments))

    def _launched(self, name: str, module: str, arguments: Sequence[str]) -> ChildProcess:
        self._commands[name] = module, arguments
        return ChildProcess(name, module, arguments, self._directory)

    def _shared_arguments(self, address: str, metrics_address: str, admin_address: str) -> list[str]:
        arguments = ["--model", str(self._model), "--dtype", self._dtype, "--device", self._device]
        arguments += ["--listen", address, "--metrics-listen", metrics_address, "--admin-listen", admin_address]
        arguments += _DRAIN
        if self.redis_url is not None:
            arguments += ["--redis-url", self.redis_url]
        return arguments

    def _stop_processes(self) -> None:
        """Stops the gateway first, then the decoders: their last answers may need an encoder."""
        for processes in (self.gateways, self.decoders, self.encoders):
            for process in processes:
                process.terminate()
            for process in processes:
                process.stop(_DRAIN_TIMEOUT_S + _STOP_MARGIN_S)


def _reserved_address(exits: contextlib.ExitStack, port: int = 0) -> str:
    """Reserves a port of this machine until `exits` ends. Returns host:port."""
    return f"127.0.0.1:{exits.enter_context(reserved_port(port))}"
