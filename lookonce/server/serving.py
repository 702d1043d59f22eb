"""The gRPC server shell of both services: address, limits, health, reflection, readiness, drain. Knows no service.

SIGTERM or SIGINT → NOT_SERVING → `drain_delay_s` → new calls get UNAVAILABLE → calls in flight finish, for at most
`drain_timeout_s` → the rest get UNAVAILABLE → exit 0. A connection is closed when its client's host has all answers. A
call whose client takes and sends no message for five seconds does not hold the drain. A second signal kills the
process, and so does the first one while the model is being loaded.

A service that cannot answer any more (`has_died`) → NOT_SERVING, new calls get UNAVAILABLE → calls in flight get their
answers within two seconds → exit 1, so that the supervisor starts a new process.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Never

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from lookonce.errors import ConfigurationError, StartupError
from lookonce.identity import CallerRole
from lookonce.logs import get_logger
from lookonce.process.end_signals import END_SIGNALS, end_by
from lookonce.process.garbage import settle
from lookonce.process.heap import FreedMemory
from lookonce.server.admission.authentication import load_authenticator
from lookonce.server.admission.call_gate import CallGate
from lookonce.server.admission.call_turns import CallTurns
from lookonce.server.admission.inflight_calls import InflightCalls
from lookonce.server.admission.quotas import Quotas
from lookonce.server.credentials import server_credentials
from lookonce.server.health_servicer import HealthServicer
from lookonce.server.interceptors import BorderInterceptor, CallMetrics
from lookonce.server.message_bounds import MAX_IMAGELESS_BYTES, SMALL_BYTES
from lookonce.server.metrics import ServingMetrics
from lookonce.server.receiving.inbox import Receivers
from lookonce.server.server_options import server_options
from lookonce.server.service_entry import ServiceEntry
from lookonce.server.settings import ServiceSettings
from lookonce.server.settings_parser import exit_with
from lookonce.server.telemetry import Telemetry
from lookonce.server.untaken_answers import drop_from_log

# Time between two questions to `is_ready`, `has_died` and the parts.
_READY_POLL_S = 0.2
# Time for the statuses of expelled calls to reach their clients before connections are closed.
_FLUSH_S = 1.0
# Drain time of a service that has died. It answers at once; the time is for the answers to reach their clients.
_LAST_ANSWERS_S = 2.0
# Services whose calls leave no access line at info level and do not delay a drain.
_QUIET = frozenset({health.SERVICE_NAME, reflection.SERVICE_NAME})
# Services that need no token: probes have none, and neither has the health check that a client's channel makes itself.
_OPEN = frozenset({health.SERVICE_NAME})
# Time after which a thread must hand the interpreter to one that waits for it. A call passes through several threads,
# and beside a busy event loop each passage took up to Python's default of 5 ms. Throughput is the same.
_SWITCH_INTERVAL_S = 0.0002

_log = get_logger(__name__)


def _always_ready() -> bool:
    return True


def _never_dies() -> bool:
    return False


class GrpcService:
    """One gRPC server from its start to the end of its drain. Use it from one event loop."""

    def __init__(
        self,
        settings: ServiceSettings,
        telemetry: Telemetry,
        services: Sequence[ServiceEntry],
        *,
        admin_services: Sequence[ServiceEntry] = (),
        quotas: Quotas | None = None,
        is_ready: Callable[[], bool] = _always_ready,
        has_died: Callable[[], bool] = _never_dies,
        parts: Mapping[str, Callable[[], bool]] | None = None,
    ) -> None:
        """`is_ready` is called several times a second and decides between SERVING and NOT_SERVING; it must not block.
        `has_died` is called with it. It returns True when only a new process helps, and never False after that.

        `parts` are further names in health, each with its own function, called as often. They show what is degraded
        while the service still works. `admin_services` and reflection are served on the settings' `admin_listen`, if it
        is set. Without `quotas` there are no limits. Raises ConfigurationError for unusable files of the settings.
        """
        self._settings = settings
        self._telemetry = telemetry
        self._services = tuple(services)
        self._admin_services = tuple(admin_services)
        self._credentials = server_credentials(settings)
        self._authenticator = load_authenticator(settings)
        self._quotas = quotas or Quotas(None, CollectorRegistry())
        self._is_ready = is_ready
        self._has_died = has_died
        self._parts = dict(parts or {})
        # The state of each part that was last reported to health.
        self._part_states: dict[str, bool] = {}
        self._calls, self._turns = InflightCalls(), CallTurns()
        self._metrics = ServingMetrics(telemetry.registry, settings.drain_delay_s + settings.drain_timeout_s)
        self._health = HealthServicer()
        self._server: grpc.aio.Server | None = None
        # Servers of the operators' calls and of health for probes, where these have their own addresses.
        self._side_servers: list[grpc.aio.Server] = []
        self._readiness: asyncio.Task[None] | None = None
        self._target = ""
        self._admin_target: str | None = None
        self._health_target: str | None = None

    @property
    def target(self) -> str:
        """The bound host:port; empty before `start`."""
        return self._target

    @property
    def admin_target(self) -> str | None:
        """The host:port of the operators' calls; None when they are not served."""
        return self._admin_target

    @property
    def health_target(self) -> str | None:
        """The host:port of health for probes; None when it has no address of its own."""
        return self._health_target

    async def start(self) -> str:
        """Listens and returns the bound host:port. Raises ConfigurationError when the address cannot be taken.

        Health says SERVING, and the ready file is written, once `is_ready` returns True.
        """
        drop_from_log()
        self._telemetry.start_endpoint()
        metrics = CallMetrics(self._telemetry.registry)
        self._server = self._build_server(
            metrics, self._services, role=None, max_message_bytes=self._settings.max_message_bytes
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._target = self._bind(self._server, "--listen", self._settings.listen, self._credentials)
        self._report(is_serving=False)
        await self._server.start()
        await self._start_side_servers(metrics)
        self._readiness = asyncio.create_task(self._follow_readiness())
        _log.info("listening", target=self._target, metrics_port=self._telemetry.metrics_port)
        return self._target

    async def serve_until_stopped(self) -> None:
        """Serves until SIGTERM or SIGINT, drains, and returns. Starts the server if it has not been started.

        Raises RuntimeError when `has_died` returned True, after all calls have ended.
        """
        if self._server is None:
            await self.start()
        assert self._readiness is not None, "start() creates the task"
        readiness = self._readiness
        settle()
        signal_came = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in END_SIGNALS:
            loop.add_signal_handler(number, signal_came.set)
        signalled = asyncio.create_task(signal_came.wait())
        try:
            await asyncio.wait({signalled, readiness}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            signalled.cancel()
            for number in END_SIGNALS:
                loop.remove_signal_handler(number)
                # A second signal ends the process even when the event loop hangs. PID 1 of a container needs a Python
                # handler for that, which runs only while Python code does.
                end_by(number)
        if readiness.done():
            await self._drain(0.0, _LAST_ANSWERS_S)
            await readiness
        await self.stop()
        if self._has_died():
            raise RuntimeError("the service died while it drained")

    async def stop(self) -> None:
        """Drains as described in the module, then frees the port and the metrics endpoint. Idempotent."""
        await self._drain(self._settings.drain_delay_s, self._settings.drain_timeout_s)

    async def _drain(self, delay_s: float, timeout_s: float) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        _log.info("draining", calls=self._calls.num_delaying)
        await self._stop_readiness()
        self._metrics.begin_drain()
        self._health.begin_drain()
        self._calls.begin_drain()
        await asyncio.sleep(delay_s)
        self._turns.end()
        left_s = await self._calls.refuse_new(timeout_s)
        _log.info("refusing new calls", calls=self._calls.num_delaying)
        # Sends GOAWAY to connected clients, before the refused ones may try again. Calls in flight continue.
        closing = asyncio.create_task(server.stop(left_s + _FLUSH_S))
        await asyncio.sleep(0)
        self._calls.answer_refused()
        await self._calls.finished(left_s)
        num_expelled = self._calls.expel_all()
        flushed_s = asyncio.get_running_loop().time() + _FLUSH_S
        await self._calls.statuses_sent()
        num_bytes = self._calls.queues.num_bytes
        # Without the shorter time, gRPC would wait all of it for clients that take no answer. It ends their calls with
        # UNAVAILABLE and a text of its own: our status would have to wait for the answer before it.
        left_s = max(0.0, flushed_s - asyncio.get_running_loop().time())
        await asyncio.gather(closing, *(one.stop(left_s) for one in (server, *self._side_servers)))
        self._telemetry.stop_endpoint()
        _log.info("stopped", expelled_calls=num_expelled, unreceived_bytes=num_bytes)

    async def _start_side_servers(self, metrics: CallMetrics) -> None:
        settings = self._settings
        if settings.admin_listen is not None:
            server = self._build_server(
                metrics, self._admin_services, role=CallerRole.OPERATOR, max_message_bytes=MAX_IMAGELESS_BYTES
            )
            names = [entry.full_name for entry in (*self._services, *self._admin_services)]
            reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
            self._admin_target = self._bind(server, "--admin-listen", settings.admin_listen, self._credentials)
            await server.start()
            self._side_servers.append(server)
        if settings.health_listen is not None:
            server = self._build_server(metrics, (), role=None, max_message_bytes=SMALL_BYTES)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
            self._health_target = self._bind(server, "--health-listen", settings.health_listen, None)
            await server.start()
            self._side_servers.append(server)

    def _build_server(
        self,
        metrics: CallMetrics,
        services: Sequence[ServiceEntry],
        *,
        role: CallerRole | None,
        max_message_bytes: int,
    ) -> grpc.aio.Server:
        gate = CallGate(self._authenticator, self._quotas, open_services=_OPEN, role=role)
        default_timeouts_s = {
            f"/{entry.full_name}/{method}": timeout_s
            for entry in services
            for method, timeout_s in entry.default_timeouts_s.items()
        }
        long_methods = frozenset(f"/{entry.full_name}/{method}" for entry in services for method in entry.long_methods)
        receivers = Receivers(self._settings.max_receive_bytes, max_message_bytes, _OPEN)
        max_answer_bytes = self._settings.max_message_bytes
        border = BorderInterceptor(
            self._calls,
            self._turns,
            gate,
            metrics,
            _QUIET,
            default_timeouts_s,
            long_methods,
            receivers,
            max_answer_bytes,
        )
        max_running = max((entry.max_running for entry in services), default=0)
        options = server_options(self._settings, max_message_bytes, max_running)
        server = grpc.aio.server(interceptors=[border], options=options)
        for entry in services:
            entry.add_to_server(server)
        return server

    def _bind(
        self, server: grpc.aio.Server, flag: str, address: str, credentials: grpc.ServerCredentials | None
    ) -> str:
        try:
            if credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, credentials)
        except RuntimeError:
            raise ConfigurationError(f"{flag}: cannot listen on {address}; is the port taken?") from None
        self._calls.queues.add_port(port)
        return f"{address.rpartition(':')[0]}:{port}"

    async def _follow_readiness(self) -> None:
        """Copies `is_ready` to health, and writes the ready file the first time. Raises RuntimeError on `has_died`."""
        was_ready, announced, freed = False, False, FreedMemory()
        while True:
            if self._has_died():
                raise RuntimeError("the service has died; a new process is needed")
            now_ready = self._is_ready()
            if now_ready != was_ready:
                self._report(is_serving=now_ready)
                _log.info("ready" if now_ready else "not ready", target=self._target)
                was_ready = now_ready
            self._report_parts()
            if now_ready and not announced:
                announced = True
                self._write_ready_file()
            await freed.return_if_due()
            await asyncio.sleep(_READY_POLL_S)

    async def _stop_readiness(self) -> None:
        if self._readiness is None:
            return
        self._readiness.cancel()
        await asyncio.gather(self._readiness, return_exceptions=True)
        if self._settings.ready_file is not None:
            self._settings.ready_file.unlink(missing_ok=True)

    def _report(self, *, is_serving: bool) -> None:
        self._metrics.report(is_serving=is_serving)
        names = [name for entry in self._services for name in (entry.full_name, *entry.health_names)]
        for name in ("", *names):
            self._health.set(name, is_serving=is_serving)

    def _report_parts(self) -> None:
        for name, is_well in self._parts.items():
            state = is_well()
            if self._part_states.get(name) != state:
                self._part_states[name] = state
                self._health.set(name, is_serving=state)
                _log.info("part is well" if state else "part is degraded", part=name)

    def _write_ready_file(self) -> None:
        path = self._settings.ready_file
        if path is None:
            return
        record = {
            "target": self._target,
            "admin_target": self._admin_target,
            "health_target": self._health_target,
            "metrics_port": self._telemetry.metrics_port,
            "pid": os.getpid(),
        }
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            json.dump(record, file)
        os.replace(file.name, path)


def check_files(settings: ServiceSettings) -> None:
    """Raises ConfigurationError if the settings name certificates, tokens, keys or a ready file that cannot be used."""
    server_credentials(settings)
    load_authenticator(settings)
    if settings.ready_file is not None:
        _check_ready_file(settings.ready_file)


def _check_ready_file(path: pathlib.Path) -> None:
    """Writes another file into the folder, as is done later, because rights and file systems can forbid it."""
    reason = None
    try:
        if path.is_dir():
            reason = "it is a folder"
        else:
            tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name).close()
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise ConfigurationError(f"ready_file: cannot write {path}: {reason}") from None


def run(main: Coroutine[Any, Any, None]) -> Never:
    """Runs a service's main coroutine and ends the process.

    Exit status: 0 after a drain, 2 with the reason on stderr when the service must not start, 1 with a traceback in the
    log on any other error. SIGTERM or SIGINT before it serves ends it at once, as a second signal does.
    """
    # A process that is still loading has no calls to lose, and ending it at once frees its memory early. Without this,
    # asyncio would answer SIGINT by cancelling `main`, which loads a model in one piece.
    for number in END_SIGNALS:
        end_by(number)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        asyncio.run(main)
    except StartupError as error:
        exit_with(error)
    except Exception:
        _log.exception("the service failed")
        raise SystemExit(1) from None
    sys.exit(0)
