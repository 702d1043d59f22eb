"""The engine in a thread of this process."""

from __future__ import annotations

from collections.abc import Callable

from decoder_svc.engine.constraint_desk import ConstraintDesk
from decoder_svc.engine.core import EngineCore, EngineFacts
from decoder_svc.engine.figures import EngineCounters, EngineLimits, EngineLoad
from decoder_svc.engine.heartbeat import Heartbeat
from decoder_svc.engine.messages import Abort, ChangeAdapter, FailedRows, Inbox, Stop, ToEventLoop
from decoder_svc.engine.step_loop import StepLoop
from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.scheduling.request import Request
from decoder_svc.scheduling.scheduler import Scheduler
from lookonce.forgotten import Forgotten
from lookonce.model.kernels.kernel_trial import kernel_choices


class EngineThread(EngineCore):
    """A step loop, its thread, and the inbox in front of it."""

    def __init__(
        self,
        runner: ModelRunnerBase,
        scheduler: Scheduler,
        limits: EngineLimits,
        heartbeat: Heartbeat,
        constraints: ConstraintDesk,
    ) -> None:
        """`heartbeat` says from when on a step counts as hanging."""
        adapters = {folder.name: folder.fingerprint for folder in runner.config.adapters or ()}
        self.facts = EngineFacts(limits, runner.backend.name, runner.weight_bytes, kernel_choices(), adapters)
        self._inbox = Inbox()
        self._step_loop = StepLoop(runner, scheduler, self._inbox, self._hand_over, heartbeat, constraints)
        self._post: Callable[[ToEventLoop], None] | None = None

    def start(self, post: Callable[[ToEventLoop], None]) -> None:
        """Starts the thread, on which `post` is then called."""
        self._post = post
        self._step_loop.start()

    def put(self, message: Request | FetchedRows | FailedRows | Abort | ChangeAdapter | Stop) -> None:
        """Puts a message into the inbox."""
        self._inbox.put(message)

    def put_forgotten(self, forgotten: Forgotten) -> None:
        """Puts images to forget into the inbox."""
        self._inbox.put_forgotten(forgotten)

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits until the thread has ended; returns False when `timeout_s` seconds are over first."""
        return self._step_loop.join(timeout_s)

    def close(self) -> None:
        """Does nothing: a thread that hangs ends with its process."""

    @property
    def is_healthy(self) -> bool:
        """Whether the thread is alive and no step hangs."""
        return self._step_loop.is_healthy

    @property
    def has_died(self) -> bool:
        """Whether the thread ended on an error."""
        return self._step_loop.has_died

    @property
    def round_s(self) -> float:
        """Age of the current step with its messages, seconds; 0 while the thread waits for work."""
        return self._step_loop.round_s

    def load(self, num_live_requests: int) -> EngineLoad:
        """Returns the current load, given the number of requests that have no terminal answer yet."""
        return self._step_loop.load(num_live_requests)

    def counters(self) -> EngineCounters:
        """Returns the sums since the start."""
        return self._step_loop.counters()

    def _hand_over(self, message: ToEventLoop) -> None:
        assert self._post is not None, "start() sets it"
        self._post(message)
