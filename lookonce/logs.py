"""The loggers of the services' code. `server/telemetry.py` decides what a service's lines look like.

Until it does, and in processes that never do (the command line, scripts, tests), lines go to stderr with tracebacks
that show no local variables. structlog's own defaults print them: they may hold prompts, and for large images it took
minutes to format them.
"""

from __future__ import annotations

import sys

import structlog


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Returns a logger. The first call of a process in which nobody has configured structlog does so."""
    if not structlog.is_configured():
        configure_plainly()
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(name)
    return logger


def configure_plainly() -> None:
    """Replaces the process' setup: plain lines for people on stderr, and tracebacks without local variables."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.dev.set_exc_info,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(0),
        # Asked for each line, because programs and tests replace sys.stderr.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )
