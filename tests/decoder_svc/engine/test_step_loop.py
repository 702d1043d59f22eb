"""The engine thread with a real scheduler: what it posts, in which order, and how it ends."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable

import pytest
import torch

from decoder_svc.constraint.answer_follower import AnswerFollower
from decoder_svc.engine import failure_count, step_loop
from decoder_svc.engine.constraint_desk import ConstraintDesk
from decoder_svc.engine.heartbeat import Heartbeat
from decoder_svc.engine.messages import Abort, Answers, Ended, FailedRows, Inbox, Stop, ToEventLoop
from decoder_svc.engine.step_loop import StepLoop
from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.sampled.pending_step import PendingStep
from decoder_svc.scheduling.encoder_cache_manager import EncoderCacheManager
from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.request_output import FinishReason, RequestOutput
from decoder_svc.scheduling.row_demand import RowDemand
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind, SamplingParams
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_limits import ChunkSize, SchedulerLimits
from decoder_svc.scheduling.scheduler_output import RowFetch, SampledToken, SchedulerOutput
from lookonce.embedding_meta import RowDtype
from lookonce.errors import (
    DeadlineError,
    EmbeddingNotCachedError,
    InternalError,
    InvalidParameterError,
    LookonceError,
    OverloadedError,
    UnavailableError,
)
from tests.decoder_svc.constraint.demo_constraints import DEMO_VOCAB, demo_constraints, demo_vocabulary
from tests.decoder_svc.scheduling.simulation import image

TIMEOUT_S = 60
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def fault() -> None:
    raise ValueError("secret inner detail")


def python_memory() -> None:
    raise MemoryError


def torch_memory() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def onednn_memory() -> None:
    raise RuntimeError("could not create a primitive")


def recursion() -> None:
    recursion()


class CountingRunner(CPUModelRunner):
    """Has no model: it samples token 7 everywhere, and fails as often and in the way that a test says."""

    def __init__(self, num_failures: int = 0, fail: Callable[[], None] = fault) -> None:
        self.num_failures = num_failures
        self.fail = fail
        # Whether rows fail instead of steps.
        self.fails_at_rows = False

    def execute_model(self, output: SchedulerOutput) -> list[SampledToken]:
        if output.chunks and self.num_failures and not self.fails_at_rows:
            self.num_failures -= 1
            self.fail()
        return [SampledToken(chunk.request_id, 7, None) for chunk in output.chunks if chunk.samples]

    def put_rows(self, fetched: FetchedRows) -> None:
        if self.num_failures and self.fails_at_rows:
            self.num_failures -= 1
            self.fail()


class LaggingRunner(CountingRunner):
    """Its steps overlap; notes launches and readings, and fails at one of the two."""

    overlaps_steps = True

    def __init__(
        self, num_failures: int = 0, fail: Callable[[], None] = fault, *, fails_at_launch: bool = True
    ) -> None:
        super().__init__(num_failures, fail)
        self.fails_at_launch = fails_at_launch
        self.log: list[str] = []

    def launch(self, output: SchedulerOutput) -> PendingStep:
        number = len([each for each in self.log if each.startswith("launch")])
        self.log.append(f"launch {number}")
        if self.fails_at_launch:
            self._fail_if_asked(number)
        return LaggingStep(self, output, number)

    def _fail_if_asked(self, number: int) -> None:
        """Spares the first step, so that one is in flight when another fails."""
        if number and self.num_failures:
            self.num_failures -= 1
            self.fail()


class LaggingStep(PendingStep):
    """A step whose tokens are read later."""

    def __init__(self, runner: LaggingRunner, output: SchedulerOutput, number: int) -> None:
        super().__init__()
        self._runner, self._output, self._number = runner, output, number

    def tokens(self) -> list[SampledToken]:
        self._runner.log.append(f"read {self._number}")
        if not self._runner.fails_at_launch:
            self._runner._fail_if_asked(self._number)
        return [SampledToken(chunk.request_id, 7, None) for chunk in self._output.chunks if chunk.samples]


class Running:
    """A step loop and the messages that it posts."""

    def __init__(self, runner: CPUModelRunner) -> None:
        self.posted: queue.SimpleQueue[ToEventLoop] = queue.SimpleQueue()
        self.inbox = Inbox()
        scheduler = Scheduler(SchedulerLimits(32, 8, 100, 64), KVCacheManager(40, 8), EncoderCacheManager(64))
        self.loop = StepLoop(runner, scheduler, self.inbox, self.posted.put, Heartbeat(math.inf), demo_constraints())

    def submit(
        self,
        request_id: RequestId,
        prompt: Prompt | None = None,
        *,
        max_tokens: int = 3,
        deadline_s: float | None = None,
    ) -> None:
        prompt = prompt or Prompt((20, 21, 22))
        params = SamplingParams(max_tokens=max_tokens)
        self.inbox.put(Request(request_id, prompt, params, arrival_s=0.0, priority=0, deadline_s=deadline_s))

    def next(self) -> ToEventLoop:
        return self.posted.get(timeout=TIMEOUT_S)

    def until_terminal(self, request_id: RequestId) -> tuple[list[RequestOutput], LookonceError | None]:
        """All outputs of a request up to its terminal answer, which may be an error."""
        outputs: list[RequestOutput] = []
        while True:
            message = self.next()
            assert isinstance(message, Answers), message
            for answered, answer in message.by_request:
                if answered != request_id:
                    continue
                if isinstance(answer, LookonceError):
                    return outputs, answer
                outputs.append(answer)
                if answer.finish_reason is not None:
                    return outputs, None

    def answers(self, *request_ids: RequestId) -> dict[RequestId, FinishReason | LookonceError]:
        """The terminal answers of these requests; all rows that they ask for arrive."""
        ends: dict[RequestId, FinishReason | LookonceError] = {}
        while set(request_ids) - ends.keys():
            message = self.next()
            if isinstance(message, RowFetch):
                self.inbox.put(FetchedRows(message.key, message.rows, bytearray(), RowDtype.FLOAT32))
                continue
            assert isinstance(message, Answers), message
            for request_id, answer in message.by_request:
                if isinstance(answer, LookonceError):
                    ends[request_id] = answer
                elif answer.finish_reason is not None:
                    ends[request_id] = answer.finish_reason
        return ends

    def stop(self) -> None:
        self.inbox.put(Stop())
        assert self.loop.join(TIMEOUT_S)


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Callable[..., Running]:
    """Starts loops and stops them after the test."""

    def start(num_failures: int = 0, fail: Callable[[], None] = fault, *, at_rows: bool = False) -> Running:
        runner = CountingRunner(num_failures, fail)
        runner.fails_at_rows = at_rows
        running = Running(runner)
        request.addfinalizer(running.stop)
        running.loop.start()
        return running

    return start


def test_a_request_gets_its_admission_its_tokens_and_one_end(started: Callable[..., Running]) -> None:
    running = started()
    running.submit(A)
    outputs, error = running.until_terminal(A)
    assert error is None
    assert outputs[0].token_ids == ()
    assert [token for output in outputs for token in output.token_ids] == [7, 7, 7]
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [FinishReason.LENGTH]


def test_a_fetch_is_posted_before_the_answers_of_its_step(started: Callable[..., Running]) -> None:
    running = started()
    running.submit(A, Prompt((20, 1, 1, 21), (image("x", 1, 2),)))
    fetch = running.next()
    assert isinstance(fetch, RowFetch)
    assert fetch.request_id == A
    running.inbox.put(FailedRows(fetch, EmbeddingNotCachedError("not cached")))
    _, error = running.until_terminal(A)
    assert isinstance(error, EmbeddingNotCachedError)
    assert error.indexes == (0,)


def test_an_abort_ends_a_request_with_its_reason_and_unknown_ids_are_ignored() -> None:
    running = Running(CountingRunner())
    running.submit(A, max_tokens=90)
    running.submit(B)
    running.inbox.put(Abort(A, FinishReason.STOP))
    running.inbox.put(Abort(RequestId("unknown"), FinishReason.ABORT))
    running.loop.start()
    message = running.next()
    assert isinstance(message, Answers)
    ends = {name: answer.finish_reason for name, answer in message.by_request if isinstance(answer, RequestOutput)}
    assert ends[A] is FinishReason.STOP
    assert running.until_terminal(B)[0][-1].finish_reason is FinishReason.LENGTH
    running.stop()


def test_a_request_whose_deadline_has_passed_is_not_computed(started: Callable[..., Running]) -> None:
    running = started()
    running.submit(A, deadline_s=0.0)
    outputs, error = running.until_terminal(A)
    assert outputs == []
    assert isinstance(error, DeadlineError)


def test_a_failed_step_ends_its_requests_with_an_opaque_error_and_the_loop_goes_on(
    started: Callable[..., Running],
) -> None:
    running = started(num_failures=1)
    running.submit(A)
    _, error = running.until_terminal(A)
    assert isinstance(error, InternalError)
    assert "secret" not in error.message
    running.submit(B)
    assert running.until_terminal(B)[1] is None
    assert running.loop.is_healthy


def test_after_a_stop_the_last_message_is_the_end() -> None:
    running = Running(CountingRunner())
    running.loop.start()
    assert running.loop.is_healthy
    running.stop()
    message = running.next()
    assert isinstance(message, Ended)
    assert isinstance(message.error, UnavailableError)
    assert (running.loop.is_healthy, running.loop.has_died) == (False, False)
    assert running.posted.empty()


def test_after_three_failures_in_a_row_the_thread_has_died_and_says_so_last() -> None:
    running = Running(CountingRunner(num_failures=3))
    running.loop.start()
    for number in range(3):
        running.submit(RequestId(f"r{number}"))
        _, error = running.until_terminal(RequestId(f"r{number}"))
        assert isinstance(error, InternalError)
    assert running.loop.join(TIMEOUT_S)
    message = running.next()
    assert isinstance(message, Ended)
    assert "another replica" in message.error.message
    assert (running.loop.is_healthy, running.loop.has_died) == (False, True)


@pytest.mark.parametrize("fail", [python_memory, torch_memory, onednn_memory])
def test_a_step_without_memory_ends_its_requests_only_however_often_in_a_row(
    started: Callable[..., Running], fail: Callable[[], None]
) -> None:
    running = started(6, fail)
    for number in range(6):
        running.submit(RequestId(f"r{number}"))
        _, error = running.until_terminal(RequestId(f"r{number}"))
        assert isinstance(error, OverloadedError)
        assert "no memory left" in error.message
    running.submit(B)
    assert running.until_terminal(B)[1] is None
    assert running.loop.is_healthy
    assert running.loop.counters().memory_errors == 6


def test_an_engine_that_never_has_memory_again_dies(
    started: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_count, "_MAX_CONSECUTIVE_MEMORY_FAILURES", 4)
    running = started(4, python_memory)
    for number in range(4):
        running.submit(RequestId(f"r{number}"))
        assert isinstance(running.until_terminal(RequestId(f"r{number}"))[1], OverloadedError)
    assert running.loop.join(TIMEOUT_S)
    assert running.loop.has_died


def test_a_recursion_that_is_too_deep_is_a_fault_like_others(started: Callable[..., Running]) -> None:
    running = started(1, recursion)
    running.submit(A)
    assert isinstance(running.until_terminal(A)[1], InternalError)
    running.submit(B)
    assert running.until_terminal(B)[1] is None


@pytest.mark.parametrize(("fail", "kind"), [(python_memory, OverloadedError), (fault, InternalError)])
def test_rows_that_cannot_be_stored_end_the_requests_that_need_them_and_are_fetched_again(
    started: Callable[..., Running], fail: Callable[[], None], kind: type[LookonceError]
) -> None:
    running = started(1, fail, at_rows=True)
    running.submit(A, album(1))
    assert type(running.answers(A)[A]) is kind
    running.submit(B, album(1))
    fetch = running.next()
    assert isinstance(fetch, RowFetch), "the rows are not taken to be there"
    running.inbox.put(FetchedRows(fetch.key, fetch.rows, bytearray(), RowDtype.FLOAT32, len(fetch.rows)))
    assert running.answers(B) == {B: FinishReason.LENGTH}


def album(num_images: int) -> Prompt:
    """Adjacent images, four of which fill the row cache."""
    images = tuple(image(f"picture {number}", 16 * number, 16) for number in range(num_images))
    return Prompt((1,) * (16 * num_images) + (20,), images)


def test_a_request_that_continues_the_images_of_another_is_answered(started: Callable[..., Running]) -> None:
    running = started()
    running.submit(A, album(4))
    running.submit(B, album(5))
    assert running.answers(A, B) == {A: FinishReason.LENGTH, B: FinishReason.LENGTH}
    assert running.loop.counters().stalls == 0


def test_requests_that_can_never_advance_are_restarted_and_answered(
    started: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the fault that the test above is about, the second request waits for rows that it claims itself."""
    monkeypatch.setattr(step_loop, "_STALL_S", 0.2)
    monkeypatch.setattr(RowDemand, "_release_before", lambda *_: None)
    running = started()
    running.submit(A, album(4))
    running.submit(B, album(5))
    assert running.answers(A, B) == {A: FinishReason.LENGTH, B: FinishReason.LENGTH}
    assert running.loop.counters().stalls == 1
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "no request could advance" in line
    assert "Request(b, waiting, 0/81 tokens)" in line


def test_a_request_that_cannot_advance_after_a_restart_ends_and_the_others_go_on(
    started: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "_STALL_S", 0.2)
    least = ChunkSize.least

    def never_for_a(self: ChunkSize, one: Request, start: int) -> int:
        return 10**6 if one.request_id == A else least(self, one, start)

    monkeypatch.setattr(ChunkSize, "least", never_for_a)
    running = started()
    running.submit(A, album(1))
    ends = running.answers(A)
    assert isinstance(ends[A], InternalError)
    assert running.loop.counters().stalls == 2
    running.submit(B, album(2))
    assert running.answers(B) == {B: FinishReason.LENGTH}
    assert running.loop.is_healthy


def test_load_counts_requests_that_are_not_in_the_batch_as_waiting() -> None:
    load = Running(CountingRunner()).loop.load(5)
    assert (load.running_requests, load.waiting_requests, load.live_requests, load.step_s) == (0, 5, 5, 0.0)


def test_a_step_is_launched_before_the_one_before_it_is_read() -> None:
    runner = LaggingRunner()
    running = Running(runner)
    running.loop.start()
    running.submit(A, max_tokens=4)
    outputs, error = running.until_terminal(A)
    running.stop()
    assert error is None
    assert [token for output in outputs for token in output.token_ids] == [7] * 4
    # The prompt's numbers come with the admission and the first token, all numbers with the last.
    assert [output.usage is not None for output in outputs] == [True, True, False, False, True]
    assert outputs[-1].usage is not None
    assert outputs[-1].usage.completion_tokens == 4
    assert runner.log == ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "launch 3", "read 2", "read 3"]


def test_the_step_in_flight_is_read_before_the_end() -> None:
    """A request that this step completes gets its answer, like without overlap."""
    runner = LaggingRunner()
    running = Running(runner)
    scheduler = running.loop._scheduler
    schedule = scheduler.schedule

    def schedule_and_stop() -> SchedulerOutput:
        running.inbox.put(Stop())
        return schedule()

    vars(scheduler)["schedule"] = schedule_and_stop
    running.submit(A, max_tokens=1)
    running.loop.start()
    outputs, error = running.until_terminal(A)
    assert error is None
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert isinstance(running.next(), Ended)
    assert runner.log == ["launch 0", "read 0"]


@pytest.mark.parametrize(("fail", "kind"), [(python_memory, OverloadedError), (fault, InternalError)])
def test_a_launch_that_fails_leaves_the_step_in_flight_its_tokens(
    fail: Callable[[], None], kind: type[LookonceError]
) -> None:
    runner = LaggingRunner(1, fail)
    running = Running(runner)
    running.loop.start()
    running.submit(A, max_tokens=4)
    outputs, error = running.until_terminal(A)
    assert type(error) is kind
    assert [token for output in outputs for token in output.token_ids] == [7]
    running.submit(B)
    assert running.until_terminal(B)[1] is None
    running.stop()


def test_a_step_that_fails_on_the_device_takes_no_other_request_along() -> None:
    """The request that came meanwhile is in the step behind the failed one, and starts again."""
    runner = LaggingRunner(1, fails_at_launch=False)
    running = Running(runner)
    running.submit(A, max_tokens=9)
    scheduler = running.loop._scheduler
    schedule = scheduler.schedule

    def schedule_and_submit() -> SchedulerOutput:
        if len(runner.log) == 1:
            running.submit(B)
        return schedule()

    vars(scheduler)["schedule"] = schedule_and_submit
    running.loop.start()
    ends = running.answers(A, B)
    running.stop()
    assert isinstance(ends[A], InternalError)
    assert ends[B] is FinishReason.LENGTH
    scheduler.check_integrity()


def test_a_device_that_fails_again_and_again_ends_the_engine() -> None:
    running = Running(LaggingRunner(3, fails_at_launch=False))
    running.loop.start()
    for number in range(3):
        running.submit(RequestId(f"r{number}"), max_tokens=9)
        assert isinstance(running.until_terminal(RequestId(f"r{number}"))[1], InternalError)
    assert running.loop.join(TIMEOUT_S)
    assert running.loop.has_died


def constrained(request_id: RequestId, pattern: str, max_tokens: int = 3) -> Request:
    constraint = Constraint(ConstraintKind.REGEX, pattern)
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=frozenset({2}), constraint=constraint)
    return Request(request_id, Prompt((20, 21, 22)), params, arrival_s=0.0)


class SlowFollower(AnswerFollower):
    """Compiles nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__(demo_vocabulary, DEMO_VOCAB)
        self.may_go_on = threading.Event()
        self.num_prepared = 0

    def prepare(self, constraint: Constraint) -> None:
        assert self.may_go_on.wait(TIMEOUT_S)
        self.num_prepared += 1
        super().prepare(constraint)


def test_requests_whose_constraints_are_compiled_keep_nobody_waiting(started: Callable[..., Running]) -> None:
    running = started()
    running.loop._constraints = ConstraintDesk(follower := SlowFollower())
    running.inbox.put(constrained(A, "[a-z]+"))
    running.inbox.put(constrained(B, "("))
    running.submit(C)
    assert running.answers(C) == {C: FinishReason.LENGTH}
    follower.may_go_on.set()
    ends = running.answers(A, B)
    # The runner of these tests has no sampler: it gives tokens that the expression does not take.
    assert isinstance(ends[A], FinishReason)
    assert isinstance(ends[B], InvalidParameterError)


def test_a_request_that_is_aborted_while_its_constraint_is_compiled_ends_once(started: Callable[..., Running]) -> None:
    running = started()
    running.loop._constraints = ConstraintDesk(follower := SlowFollower())
    running.inbox.put(constrained(A, "[a-z]+"))
    running.inbox.put(Abort(A, FinishReason.ABORT))
    assert running.answers(A) == {A: FinishReason.ABORT}
    follower.may_go_on.set()
    running.submit(B)
    assert running.answers(B) == {B: FinishReason.LENGTH}
    assert not running.loop._scheduler.has_requests()


def test_requests_that_left_cost_no_compiling(started: Callable[..., Running]) -> None:
    running = started()
    running.loop._constraints = ConstraintDesk(follower := SlowFollower())
    ids = [RequestId(f"r{number}") for number in range(9)]
    for request_id in ids:
        running.inbox.put(constrained(request_id, "[a-z]+"))
    for request_id in ids:
        running.inbox.put(Abort(request_id, FinishReason.ABORT))
    assert running.answers(*ids) == dict.fromkeys(ids, FinishReason.ABORT)
    follower.may_go_on.set()
    running.inbox.put(constrained(A, "[a-z]+"))
    running.answers(A)
    # The first one was begun before it was aborted.
    assert follower.num_prepared <= 2
