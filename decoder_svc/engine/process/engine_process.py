"""The service's side of an engine in a process of its own.

Two threads serve the pipe: one encodes and sends messages, so that neither takes time on the event loop; one receives
and decodes them. The engine's side is engine_worker.py.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from decoder_svc.engine.core import EngineCore
from decoder_svc.engine.figures import EngineCounters, EngineLoad
from decoder_svc.engine.messages import (
    Abort,
    AdapterRead,
    Answers,
    ChangeAdapter,
    Compiled,
    Ended,
    FailedRows,
    Inbox,
    Stop,
    ToEventLoop,
)
from decoder_svc.engine.process.codec import decode_in_service, decode_start, encode_for_process
from decoder_svc.engine.process.figure_board import FigureBoard
from decoder_svc.engine.process.pipe import Pipe
from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.scheduler_output import RowFetch
from lookonce.errors import LookonceError, UnavailableError
from lookonce.forgotten import Forgotten
from lookonce.image_file import ImageFile
from lookonce.process.bound_process import start_bound_process

logger = logging.getLogger(__name__)

# The engine's side: it loads the model, so it is a module of the package and not of this room.
_MODULE = "decoder_svc.engine_worker"
# Time that a process which has said that it ends, or has closed its pipe, gets to exit, seconds.
_EXIT_TIMEOUT_S = 10.0
# Shorter silence may come from a busy machine, seconds. The process shows a sign of life several times per second.
_LEAST_SILENCE_S = 5.0


class EngineProcess(EngineCore):
    """A process with scheduler, runner and model. It ends with this one."""

    def __init__(self, settings: Mapping[str, Any], max_step_s: float) -> None:
        """Starts the process with the service's settings. `wait_until_loaded` comes next.

        An engine that takes longer than `max_step_s` seconds for a step, or shows no sign of life for as long, counts
        as hanging.
        """
        self._max_step_s = max_step_s
        self._inbox = Inbox()
        self._has_died = False
        self._has_ended = False
        # Whether the engine has said that it ends, and whether this side ends it.
        self._is_leaving = self._is_closing = False
        # The files of images of live requests, which the engine does not need.
        self._files: dict[RequestId, dict[bytes, ImageFile]] = {}
        self._post: Callable[[ToEventLoop], None] | None = None
        self._process, self._pipe, self._board = _started()
        self._sender = threading.Thread(target=self._send_all, name="engine-send", daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, name="engine-receive", daemon=True)
        with suppress(OSError):
            self._pipe.send(json.dumps(settings).encode())

    def wait_until_loaded(self) -> None:
        """Waits until the process has loaded its model; it is closed if it has not.

        Raises the StartupError of an engine that refuses to start, and RuntimeError if its process ends.
        """
        try:
            self.facts = decode_start(self._pipe.receive()[0])
        except (EOFError, OSError):
            self._is_leaving = True
            self.close()
            status = self._process.returncode
            raise RuntimeError(f"the engine process ended with status {status} before its model was loaded") from None
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The id of the engine process."""
        return self._process.pid

    def start(self, post: Callable[[ToEventLoop], None]) -> None:
        """Starts the threads. `post` is called on the one that receives."""
        self._post = post
        self._sender.start()
        self._receiver.start()

    def put(self, message: Request | FetchedRows | FailedRows | Abort | ChangeAdapter | Stop) -> None:
        """Queues a message for the sending thread, and keeps the image files of a request."""
        if isinstance(message, Request):
            files = {item.key.value: item.data for item in message.prompt.images if item.data is not None}
            if files:
                self._files[message.request_id] = files
        self._inbox.put(message)

    def put_forgotten(self, forgotten: Forgotten) -> None:
        """Queues images to forget for the sending thread."""
        self._inbox.put_forgotten(forgotten)

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits until the engine has ended; returns False when `timeout_s` seconds are over first."""
        self._receiver.join(timeout_s)
        return not self._receiver.is_alive()

    def close(self) -> None:
        """Ends the process, by force if it does not end by itself, and the threads. It may be called again."""
        self._is_closing = True
        self._pipe.shut_down()
        try:
            self._process.wait(_EXIT_TIMEOUT_S if self._is_leaving else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._inbox.put(Stop())
        for thread in (self._sender, self._receiver):
            if thread.ident is not None:
                thread.join()
        self._pipe.close()

    @property
    def is_healthy(self) -> bool:
        """Whether the process runs and shows signs of life, and no step hangs."""
        return self._receiver.is_alive() and not self._has_ended and self.round_s <= self._max_step_s

    @property
    def has_died(self) -> bool:
        """Whether the engine ended on an error, or its process ended by itself."""
        return self._has_died

    @property
    def round_s(self) -> float:
        """Age of the current step or of the latest sign of life, seconds; 0 while the engine waits for work."""
        now_s, began_s = time.monotonic(), self._board.round_began_s
        silence_s = now_s - self._board.alive_s
        step_s = 0.0 if began_s is None else now_s - began_s
        return max(step_s, silence_s if silence_s > _LEAST_SILENCE_S else 0.0)

    def load(self, num_live_requests: int) -> EngineLoad:
        """Returns the current load, given the number of requests that have no terminal answer yet."""
        load = self._board.load()
        # The board shows the latest step, after which requests may have ended.
        running = min(load.running_requests, num_live_requests)
        return replace(load, running_requests=running, waiting_requests=num_live_requests - running)

    def counters(self) -> EngineCounters:
        """Returns the sums since the start."""
        return self._board.counters()

    def _send_all(self) -> None:
        """Sends every queued message up to `Stop`, on a thread of its own."""
        with suppress(OSError):
            while True:
                message = self._inbox.take(None)
                assert message is not None, "take() waits for any time"
                assert not isinstance(message, Compiled | AdapterRead), "that is work of the engine's process"
                frame, payload = encode_for_process(message)
                self._pipe.send(frame, payload)
                if isinstance(message, Stop):
                    return

    def _receive_all(self) -> None:
        """Posts every message up to `Ended`, on a thread of its own."""
        assert self._post is not None, "start() sets it"
        ended = Ended(UnavailableError("the engine stopped; retry on another replica"), has_died=True)
        try:
            while True:
                message = decode_in_service(self._pipe.receive()[0])
                if isinstance(message, Ended):
                    ended, self._is_leaving = message, True
                    return
                if isinstance(message, Answers):
                    self._drop_files(message)
                self._post(self._with_file(message) if isinstance(message, RowFetch) else message)
        except (EOFError, OSError):
            if not self._is_closing:
                logger.error("the engine process %d ended by itself", self.pid)
        except Exception:
            logger.exception("a message of the engine process could not be read")
        finally:
            # `submit` refuses requests from now on, so `Ended` reaches every request that was submitted.
            self._has_died, self._has_ended = ended.has_died, True
            self._files.clear()
            self._post(ended)
            self._pipe.shut_down()

    def _with_file(self, fetch: RowFetch) -> RowFetch:
        """Returns the fetch with the image's file, if the request that needs its rows came with it."""
        if fetch.data is None:
            return fetch
        return replace(fetch, data=self._files.get(fetch.request_id, {}).get(fetch.key.value))

    def _drop_files(self, answers: Answers) -> None:
        for request_id, answer in answers.by_request:
            if isinstance(answer, LookonceError) or answer.finish_reason is not None:
                self._files.pop(request_id, None)


def _started() -> tuple[subprocess.Popen[bytes], Pipe, FigureBoard]:
    """Starts the process and returns it with its pipe and its board."""
    ours, theirs = socket.socketpair()
    with theirs, ExitStack() as unless_started:
        unless_started.enter_context(ours)
        fd, board = FigureBoard.create()
        with open(fd, "rb") as board_file:
            fds = (theirs.fileno(), board_file.fileno())
            process = start_bound_process(_MODULE, [str(fd) for fd in fds], fds)
        unless_started.pop_all()
    return process, Pipe(ours), board
