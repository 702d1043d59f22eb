"""Logs, the request id and the metrics registry of one process. Knows no RPC, no model and no cache.

Logs go to stderr, one line per event. Standard-library loggers and structlog loggers share one pipeline, so that a
library's warning looks like our own lines. Tracebacks never show local variables, which may hold prompts.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from typing import Literal, Self, TextIO

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector

from lookonce.errors import ConfigurationError
from lookonce.identity import REQUEST_ID
from lookonce.logs import get_logger
from lookonce.server.malformed_metadata import limit_in_log
from lookonce.server.metrics_endpoint import MetricsEndpoint
from lookonce.server.setting_names import unknown_variables
from lookonce.server.settings import ServiceSettings

_HANDLER_NAME = "lookonce"
# Loggers that follow the chosen level. All others, those of libraries, log warnings and errors only.
_OWN_LOGGERS = ("lookonce", "encoder_svc", "decoder_svc", "gateway_svc", "__main__")
# Always logs at info level, because an audit record must be complete.
_AUDIT_LOGGER = "lookonce.audit"

# Libraries that log through a handler of their own, which is removed.
_CAPTIVE_LOGGERS = ("transformers",)

_log = get_logger(__name__)

LogFormat = Literal["json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]


def configure_logging(log_format: LogFormat, log_level: LogLevel, stream: TextIO | None = None) -> None:
    """Sends every log line of the process to `stream` (default: stderr). A later call replaces the earlier setup."""
    stream = sys.stderr if stream is None else stream
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *processors,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=processors,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(log_format, stream)],
    )
    _install_handler(formatter, stream, log_level)


def _renderers(log_format: LogFormat, stream: TextIO) -> list[structlog.typing.Processor]:
    if log_format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    return [
        structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback),
    ]


def _install_handler(formatter: logging.Formatter, stream: TextIO, log_level: LogLevel) -> None:
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if handler.name == _HANDLER_NAME]:
        root.removeHandler(handler)
    handler = logging.StreamHandler(stream)
    handler.name = _HANDLER_NAME
    handler.setFormatter(formatter)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    limit_in_log()
    for name in _CAPTIVE_LOGGERS:
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = True
    for name in _OWN_LOGGERS:
        logging.getLogger(name).setLevel(log_level.upper())
    logging.getLogger(_AUDIT_LOGGER).setLevel(logging.INFO)


def accept_request_id(offered: str | None) -> str:
    """Returns the caller's id if it has the form of one, else a new one."""
    if offered is not None and REQUEST_ID.fullmatch(offered):
        return offered
    return uuid.uuid4().hex


def bind_request_id(request_id: str) -> None:
    """Adds the id to every later log line of this task and of tasks that it starts."""
    structlog.contextvars.bind_contextvars(request_id=request_id)


def replace_request_id(request_id: str) -> None:
    """Gives the call that this task serves the id of its request. Later log lines have the former one as `call_id`."""
    call_id = current_request_id()
    if request_id != call_id:
        structlog.contextvars.bind_contextvars(request_id=request_id, call_id=call_id)


def bind_trace_id(trace_id: str | None) -> None:
    """Adds the id of the call's trace to every later log line of this task; None adds nothing."""
    if trace_id is not None:
        structlog.contextvars.bind_contextvars(trace_id=trace_id)


def current_request_id() -> str | None:
    """Returns the id of the call that this task serves, or None outside of a call."""
    found = structlog.contextvars.get_contextvars().get("request_id")
    return None if found is None else str(found)


class Telemetry:
    """The metrics registry of one process and, if configured, its Prometheus endpoint."""

    def __init__(self, metrics_listen: str | None = None) -> None:
        """`metrics_listen` is the endpoint's host:port (port 0 takes a free one); None: no endpoint."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._metrics_listen = metrics_listen
        self._endpoint: MetricsEndpoint | None = None

    @classmethod
    def from_settings(cls, settings: ServiceSettings) -> Self:
        """Configures the logs of the process and creates its registry. Logs which LOOKONCE_ variables nothing reads."""
        configure_logging(settings.log_format, settings.log_level)
        for warning in unknown_variables(os.environ, ServiceSettings.model_fields):
            _log.warning(warning)
        return cls(settings.metrics_listen)

    @property
    def metrics_port(self) -> int | None:
        """The port of the running endpoint, or None."""
        return None if self._endpoint is None else self._endpoint.port

    def start_endpoint(self) -> None:
        """Serves the registry in a daemon thread. Raises ConfigurationError when the address cannot be taken."""
        if self._metrics_listen is None or self._endpoint is not None:
            return
        host, _, port = self._metrics_listen.rpartition(":")
        try:
            self._endpoint = MetricsEndpoint(host.strip("[]"), int(port), self.registry)
        except OSError as error:
            raise ConfigurationError(f"--metrics-listen: cannot listen on {self._metrics_listen}: {error}") from None

    def stop_endpoint(self) -> None:
        """Closes the endpoint and joins its thread."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.stop()
