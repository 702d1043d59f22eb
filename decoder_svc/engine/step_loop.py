"""The engine thread: takes messages from the inbox, runs steps, and posts their answers to the event loop.

A step is schedule → launch → update. Nothing here touches asyncio: `post` is the only way out.

On a device whose steps overlap, step n + 1 is scheduled and launched while step n is in flight. Then step n is settled:
its tokens are read and passed to the scheduler. The invariant: whenever messages are handled or a step is scheduled, at
most one step is in flight, the scheduler counts it as computed (`Scheduler.advance`), and each of its requests has at
most one token whose id is unknown. The device computes steps in the order of their launches. So whatever a request in
flight gives up (blocks, rows, its place in the batch) can be given away at once: only steps behind the one in flight
use it. Whatever depends on an id waits until the step is settled: answers, usage, stop ids, and hashes of blocks with
that id. A request that has ended by then takes nothing from the step.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from decoder_svc.engine.adapter_loading import AdapterLoading
from decoder_svc.engine.constraint_desk import ConstraintDesk
from decoder_svc.engine.failure_count import FailureCount
from decoder_svc.engine.figures import EngineCounters, EngineLoad
from decoder_svc.engine.heartbeat import Heartbeat
from decoder_svc.engine.messages import (
    STOPPING,
    Abort,
    AdapterChanged,
    AdapterRead,
    Answer,
    Answers,
    ChangeAdapter,
    Compiled,
    Ended,
    FailedRows,
    Inbox,
    Queued,
    Stop,
    ToEventLoop,
)
from decoder_svc.engine.step_outputs import outputs_of
from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.request_output import RequestOutput
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_output import SampledToken, SchedulerOutput, TokenUpdate
from lookonce.errors import (
    DeadlineError,
    EmbeddingNotCachedError,
    InternalError,
    LookonceError,
    UnavailableError,
)
from lookonce.forgotten import Forgotten

logger = logging.getLogger(__name__)

# Weight of a new step in the mean duration of steps: about the last ten count.
_STEP_WEIGHT = 0.1
# Time without a message after which live requests that wait for nothing are restarted, seconds.
_STALL_S = 2.0
_NAN = "the model computed NaN: its weights or those of the adapter may be damaged"
_NO_ADAPTER = "the adapter was unloaded; retry on another replica"


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that the runner has been given."""

    output: SchedulerOutput
    # Waits for the device and returns the sampled tokens.
    tokens: Callable[[], list[SampledToken]]
    # Whether the next step can be launched before this one's tokens are known.
    may_run_ahead: bool
    # The time at which it was scheduled, seconds.
    began_s: float


class StepLoop:
    """Scheduler and runner, and the one thread that uses them."""

    def __init__(
        self,
        runner: ModelRunnerBase,
        scheduler: Scheduler,
        inbox: Inbox,
        post: Callable[[ToEventLoop], None],
        heartbeat: Heartbeat,
        constraints: ConstraintDesk,
    ) -> None:
        """`post` is called on the engine thread and must not block.

        A step that takes longer than `heartbeat` allows makes the engine unhealthy until the step ends.
        """
        self._runner = runner
        self._scheduler = scheduler
        self._inbox = inbox
        self._post = post
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._heartbeat = heartbeat
        self._constraints = constraints
        self._adapters = AdapterLoading(runner, inbox.put)
        self._is_running = False
        self._has_died = False
        # Answers of the current step, until they are posted.
        self._outbox: list[tuple[RequestId, Answer]] = []
        self._failures = FailureCount()
        self._made_progress = False
        self._num_stalls = 0
        # The request that was served first after the latest restart of all, until a step computes something.
        self._restarted_head: Request | None = None
        # The step that runs on the device while the next one is prepared.
        self._in_flight: _Launched | None = None
        # The time at which the latest step was settled, and the mean duration of the latest steps, seconds.
        self._settled_s = -math.inf
        self._step_s = 0.0

    # Any thread may call these. The numbers are read while the engine thread changes them, each of them in one read.

    def start(self) -> None:
        """Starts the thread, which then waits for messages."""
        self._is_running = True
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits until the thread has ended; returns False when `timeout_s` is over first."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_healthy(self) -> bool:
        """Whether the thread is alive and no step hangs."""
        return self._is_running and self._thread.is_alive() and self._heartbeat.is_fresh

    @property
    def round_s(self) -> float:
        """Age of the current step with its messages, seconds; 0 while the thread waits for work."""
        return self._heartbeat.round_s

    @property
    def has_died(self) -> bool:
        """Whether the thread ended on an error. It does not start again: only a new process helps."""
        return self._has_died

    def load(self, num_live_requests: int) -> EngineLoad:
        """Returns the current load, given the number of requests that have no terminal answer yet."""
        return EngineLoad(
            running_requests=self._scheduler.num_running,
            waiting_requests=max(0, num_live_requests - self._scheduler.num_running),
            waiting_for_embeddings=self._scheduler.num_waiting_for_rows,
            kv_cache_usage=self._scheduler.kv_cache.usage,
            encoder_cache_rows=self._scheduler.encoder_cache.num_reserved_rows,
            step_s=self._step_s,
        )

    def counters(self) -> EngineCounters:
        """Returns the sums since the start."""
        prefix_cache = self._scheduler.kv_cache.stats
        return EngineCounters(
            preemptions=self._scheduler.num_preemptions,
            prefix_query_tokens=prefix_cache.num_query_tokens,
            prefix_hit_tokens=prefix_cache.num_hit_tokens,
            draft_tokens=self._scheduler.speculation.num_drafted,
            accepted_draft_tokens=self._scheduler.speculation.num_accepted,
            stalls=self._num_stalls,
            memory_errors=self._failures.num_memory_errors,
        )

    # Engine thread only.

    def _run(self) -> None:
        reason = STOPPING
        try:
            while self._take_messages():
                self._step()
                self._flush()
            if self._in_flight is not None:
                self._settle(self._in_flight)
        except BaseException:
            logger.exception("the engine stopped")
            reason = "the engine stopped; retry on another replica"
            self._has_died = True
        finally:
            # `submit` refuses requests from now on, so `Ended` reaches every request that was submitted.
            self._is_running = False
            self._flush()
            self._post(Ended(UnavailableError(reason), self._has_died))
            self._constraints.close()

    def _take_messages(self) -> bool:
        """Handles every message in the inbox, and waits for one while there is no work. Returns False on `Stop`."""
        while True:
            is_waited_for = self._in_flight is not None or bool(self._outbox)
            has_work = is_waited_for or (self._made_progress and self._scheduler.has_requests())
            if not has_work:
                self._heartbeat.rest()
            message = self._inbox.take(0 if has_work else self._patience_s())
            self._heartbeat.begin_round()
            if message is None:
                if not has_work:
                    self._end_stall()
                return True
            if isinstance(message, Stop):
                return False
            self._handle(message)
            self._made_progress = True

    def _patience_s(self) -> float | None:
        """Returns how long to wait for a message while there is no work; None: any time."""
        return _STALL_S if self._scheduler.can_be_stalled() else None

    def _end_stall(self) -> None:
        """Restarts all requests, because none can advance and none waits for rows on their way.

        The scheduler promises that this never happens, so its state goes to the log. If the request served first still
        cannot advance afterwards, it ends with an error, and the others go on.
        """
        live = self._scheduler.live_requests()
        incident = uuid.uuid4().hex
        first = ", ".join(map(str, live[:8]))
        logger.error("no request could advance, incident %s: %s; %s", incident, self.load(len(live)), first)
        self._num_stalls += 1
        head = self._scheduler.restart_all()
        if head is self._restarted_head:
            self._scheduler.abort(head.request_id)
            self._outbox.append((head.request_id, InternalError(f"internal error {incident}")))
        self._restarted_head = head
        self._made_progress = True

    def _handle(self, message: Queued | Forgotten) -> None:
        if isinstance(message, Request):
            self._begin(message)
        elif isinstance(message, Compiled):
            self._take_compiled(message)
        elif isinstance(message, FetchedRows):
            self._take_rows(message)
        elif isinstance(message, FailedRows):
            self._fail_rows(message)
        elif isinstance(message, Forgotten):
            self._scheduler.forget(message)
        elif isinstance(message, ChangeAdapter) and message.folder:
            self._adapters.begin(message)
        elif isinstance(message, ChangeAdapter):
            self._drop_adapter(message)
        elif isinstance(message, AdapterRead):
            self._post(self._adapters.finish(message))
        elif isinstance(message, Abort):
            request = self._constraints.give_up(message.request_id) or self._scheduler.abort(message.request_id)
            if request is not None:
                output = RequestOutput((), (), message.reason, replace(request.usage))
                self._outbox.append((request.request_id, output))

    def _drop_adapter(self, change: ChangeAdapter) -> None:
        """Frees an adapter. Requests that still have it are being aborted, or were refused."""
        for request in self._scheduler.live_requests():
            if request.cache_scope.adapter == change.fingerprint:
                self._scheduler.abort(request.request_id)
                self._outbox.append((request.request_id, UnavailableError(_NO_ADAPTER)))
        self._runner.drop_adapter(change.fingerprint)
        self._post(AdapterChanged(change.number, None))

    def _add(self, request: Request) -> None:
        """Gives a request to the scheduler, unless its adapter has gone."""
        if self._runner.has_adapter(request.cache_scope.adapter):
            self._scheduler.add(request)
        else:
            self._outbox.append((request.request_id, UnavailableError(_NO_ADAPTER)))

    def _begin(self, request: Request) -> None:
        if request.params.constraint is None:
            self._add(request)
            return
        self._constraints.begin(request, self._inbox.put)

    def _take_compiled(self, compiled: Compiled) -> None:
        """Adds a request whose constraint is ready. It may have been aborted meanwhile."""
        request = self._constraints.take(compiled.request_id)
        if request is None:
            return
        if isinstance(compiled.outcome, LookonceError):
            self._outbox.append((compiled.request_id, compiled.outcome))
            return
        request.constraint = compiled.outcome
        self._add(request)

    def _take_rows(self, message: FetchedRows) -> None:
        """Stores rows that arrived. If that fails, the requests that need them end; later ones fetch the rows again."""
        if not self._scheduler.rows_arrived(message.key, message.rows, message.num_encoded_rows):
            return
        try:
            self._runner.put_rows(message)
        except Exception as error:
            answer = self._failures.answer_to(error, "storing embedding rows")
            self._scheduler.encoder_cache.lose(message.key, message.rows)
            for request in self._scheduler.rows_failed(message.key, message.rows, had_data=True):
                self._outbox.append((request.request_id, answer))
            self._failures.check()

    def _fail_rows(self, message: FailedRows) -> None:
        fetch = message.fetch
        for request in self._scheduler.rows_failed(fetch.key, fetch.rows, had_data=fetch.data is not None):
            error = message.error
            if isinstance(error, EmbeddingNotCachedError):
                indexes = [i for i, item in enumerate(request.prompt.images) if item.key == fetch.key]
                error = EmbeddingNotCachedError(error.message, indexes=indexes)
            self._outbox.append((request.request_id, error))

    def _step(self) -> None:
        """Schedules and launches a step, and settles the one that was in flight meanwhile."""
        began_s = time.monotonic()
        output = self._scheduler.schedule()
        before, self._in_flight = self._in_flight, None
        self._made_progress = bool(before or output.chunks or output.fetches or output.released or output.expired)
        self._announce(output)
        # Callers are told of their admission while the step computes, so that this message does not delay the token's.
        self._flush()
        try:
            launched = self._launch(output, began_s)
        except Exception as error:
            # The step before it may be complete, or fail as well; in that case this step's requests start again.
            if before is None or self._settle(before, output):
                self._fail_step(error, output)
            return
        if before is not None and not self._settle(before, output):
            return
        if launched.may_run_ahead:
            self._scheduler.advance(output)
            self._in_flight = launched
        else:
            self._settle(launched)

    def _announce(self, output: SchedulerOutput) -> None:
        """Posts the fetches of a step, and notes the answers that do not depend on its result."""
        self._outbox.extend((request_id, _too_late()) for request_id in output.expired)
        for fetch in output.fetches:
            self._post(fetch)
        self._outbox.extend(
            (admitted.request_id, self._admission(admitted.request_id))
            for admitted in output.admitted
            if admitted.num_prompt_tokens == len(admitted.token_ids)
        )

    def _launch(self, output: SchedulerOutput, began_s: float) -> _Launched:
        """Gives the step to the runner. A step without chunks has nothing to wait for."""
        if not (self._runner.overlaps_steps and output.chunks):
            tokens = self._runner.execute_model(output)
            return _Launched(output, lambda: tokens, False, began_s)
        pending = self._runner.launch(output)
        may_run_ahead = pending.may_run_ahead and self._scheduler.may_run_ahead(output)
        return _Launched(output, pending.tokens, may_run_ahead, began_s)

    def _settle(self, launched: _Launched, behind: SchedulerOutput | None = None) -> bool:
        """Waits for a step's tokens and passes them on. Returns False if the step failed.

        `behind` is the step that has been scheduled after it, if there is one; its results must not be used then.
        """
        try:
            sampled = launched.tokens()
        except Exception as error:
            self._fail_step(error, launched.output, behind)
            return False
        updates = self._without_dead_ends(self._scheduler.update(launched.output, sampled))
        self._outbox.extend(outputs_of(self._without_nan(updates, sampled)))
        if launched.output.chunks:
            # A step without chunks only removes requests from the batch: its success does not end a row of failures.
            self._failures.note_success()
            self._restarted_head = None
            began_s = max(launched.began_s, self._settled_s)
            self._settled_s = time.monotonic()
            took_s = self._settled_s - began_s
            self._step_s += _STEP_WEIGHT * (took_s - self._step_s) if self._step_s else took_s
        return True

    def _without_dead_ends(self, updates: list[TokenUpdate]) -> list[TokenUpdate]:
        """Ends requests whose constraints have failed, and returns the updates of all others.

        Their latest token was sampled without a constraint.
        """
        dead = {
            update.request.request_id: update.request.constraint.error
            for update in updates
            if update.request.constraint is not None and update.request.constraint.error is not None
        }
        for request_id, error in dead.items():
            self._scheduler.abort(request_id)
            self._outbox.append((request_id, error))
        return [update for update in updates if update.request.request_id not in dead]

    def _without_nan(self, updates: list[TokenUpdate], sampled: list[SampledToken]) -> list[TokenUpdate]:
        """Ends requests for which the model has computed NaN, and returns the updates of all others.

        Blocks of the same step may hold NaN as well, also those of tokens in front of the one it began with. So the
        prefix cache is emptied. A request that has such a block already gets NaN, too, and ends here.
        """
        broken = {token.request_id for token in sampled if token.is_nan}
        if not broken:
            return updates
        incident = uuid.uuid4().hex
        logger.error("the model computed NaN for %s, incident %s", ", ".join(sorted(broken)), incident)
        for request_id in broken:
            # It may have ended before this step was settled, or with this token.
            is_live = self._scheduler.abort(request_id) is not None
            if is_live or any(update.request.request_id == request_id for update in updates):
                self._outbox.append((request_id, InternalError(f"{_NAN}, incident {incident}")))
        self._scheduler.kv_cache.reset_prefix_cache()
        return [update for update in updates if update.request.request_id not in broken]

    def _admission(self, request_id: RequestId) -> RequestOutput:
        return RequestOutput((), (), None, replace(self._scheduler.request(request_id).usage))

    def _fail_step(self, error: Exception, output: SchedulerOutput, behind: SchedulerOutput | None = None) -> None:
        """Ends the step's requests with an error that shows nothing of the inside; all others continue."""
        answer = self._failures.answer_to(error, "an engine step")
        for request in self._scheduler.fail_step(output, behind):
            self._outbox.append((request.request_id, answer))
        self._failures.check()

    def _flush(self) -> None:
        if self._outbox:
            answers, self._outbox = self._outbox, []
            self._post(Answers(tuple(answers)))


def _too_late() -> DeadlineError:
    return DeadlineError("the deadline comes before the first token could")
