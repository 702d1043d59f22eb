"""The engine's loop, driven round by round in the test's own thread, with a workload that may contain any mishap."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace

from decoder_svc.engine.heartbeat import Heartbeat
from decoder_svc.engine.messages import Abort, Answer, Answers, Inbox, Queued, ToEventLoop
from decoder_svc.engine.step_loop import StepLoop
from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.runner.row_cache import RowCache
from decoder_svc.runner.sampled.pending_step import PendingStep
from decoder_svc.scheduling.encoder_cache_manager import EncoderCacheManager
from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.request_output import FinishReason, RequestOutput, RequestUsage, TokenLogprobs
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_limits import SchedulerLimits
from decoder_svc.scheduling.scheduler_output import RowFetch, SampledToken, SchedulerOutput
from lookonce.embedding_meta import RowDtype
from lookonce.errors import LookonceError
from lookonce.forgotten import EVERYTHING, Forgotten
from tests.decoder_svc.constraint.demo_constraints import demo_constraints
from tests.parity import offline

MAX_ROUNDS = 3000


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a workload and the round in which it comes."""

    request_id: RequestId
    prompt: Prompt
    params: SamplingParams
    at_round: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests and mishaps, by round."""

    asked: list[Asked]
    aborts: dict[int, RequestId] = field(default_factory=dict)
    # Whether the launch fails, or else the reading of the tokens.
    failures: dict[int, bool] = field(default_factory=dict)
    forgetting: set[int] = field(default_factory=set)

    @property
    def quiet(self) -> Workload:
        """The same requests without mishaps."""
        return Workload(self.asked)


@dataclass(slots=True)
class Served:
    """The engine's answers to one request, put together."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: FinishReason | LookonceError | None = None
    usage: RequestUsage | None = None


class FailingTokens(PendingStep):
    """A step whose tokens cannot be read."""

    def tokens(self) -> list[SampledToken]:
        """Raises like a device that failed meanwhile."""
        raise ValueError("secret inner detail")


class Idle(Exception):
    """The engine would wait for a message."""


class DrivenInbox(Inbox):
    """An inbox that raises an exception where the thread would wait."""

    def take(self, timeout_s: float | None) -> Queued | Forgotten | None:
        """Returns the oldest message. Raises Idle where the engine's thread would wait."""
        message = super().take(0)
        if message is None and timeout_s != 0:
            raise Idle
        return message


class DrivenEngine:
    """One scheduler, one runner, and the loop between them."""

    def __init__(
        self,
        model: offline.OfflineModel,
        *,
        overlaps: bool,
        num_blocks: int,
        max_num_batched_tokens: int = 40,
        max_num_seqs: int = 6,
        cache_rows: int = 100,
    ) -> None:
        self._model = model
        runner = self._runner = model.runner
        runner.initialize_kv_cache(num_blocks)
        runner.capture_model()
        runner.row_cache = RowCache(runner.transfer, runner.model.dtype)
        runner.overlaps_steps = overlaps
        self.scheduler = Scheduler(
            SchedulerLimits(max_num_batched_tokens, max_num_seqs, 4000, cache_rows),
            KVCacheManager(num_blocks, runner.config.block_size),
            EncoderCacheManager(cache_rows),
        )
        self._inbox = DrivenInbox()
        self._loop = StepLoop(runner, self.scheduler, self._inbox, self._take, Heartbeat(math.inf), demo_constraints())
        self._served: dict[RequestId, Served] = {}
        self._travelling: list[tuple[int, RowFetch]] = []
        self.round = 0
        # Launches, and those of them that came while the tokens of another step were unread.
        self.num_launches = self.num_ahead = 0
        self._num_unread = 0
        self._fails_at: bool | None = None

    def serve(self, workload: Workload) -> dict[RequestId, Served]:
        """Runs rounds until every request has ended. Checks the scheduler after each."""
        self._served = {one.request_id: Served() for one in workload.asked}
        by_round = defaultdict(list)
        for one in workload.asked:
            by_round[one.at_round].append(one)
        last = max(by_round)
        launch = self._runner.launch
        vars(self._runner)["launch"] = lambda output: self._launch(launch, output)
        try:
            for self.round in range(MAX_ROUNDS):
                self._put(by_round[self.round], workload)
                try:
                    self._loop._take_messages()
                except Idle:
                    assert self._loop._in_flight is None, "a step is in flight and nobody waits for it"
                    assert not self.scheduler.can_be_stalled(), "no request can advance"
                    if self.round > last and not self._travelling:
                        break
                    continue
                self._loop._step()
                self._loop._flush()
                self.scheduler.check_integrity()
        finally:
            del vars(self._runner)["launch"]
        assert all(one.end is not None for one in self._served.values()), "a request has no end"
        assert not self.scheduler.has_requests()
        assert self.scheduler.kv_cache.usage == 0
        return self._served

    def _put(self, asked: list[Asked], workload: Workload) -> None:
        for one in asked:
            arrival_s = float(int(one.request_id[1:]))
            self._inbox.put(Request(one.request_id, one.prompt, one.params, arrival_s=arrival_s))
        if self.round in workload.aborts:
            self._inbox.put(Abort(workload.aborts[self.round], FinishReason.ABORT))
        if self.round in workload.forgetting:
            self._inbox.put_forgotten(EVERYTHING)
        self._fails_at = workload.failures.get(self.round)
        arrived = [fetch for at_round, fetch in self._travelling if at_round <= self.round]
        self._travelling = [each for each in self._travelling if each[0] > self.round]
        for fetch in arrived:
            values = self._model.rows[fetch.key][fetch.rows.start : fetch.rows.stop]
            data = bytearray(values.numpy().tobytes())
            self._inbox.put(FetchedRows(fetch.key, fetch.rows, data, RowDtype.FLOAT32, fetch.num_image_rows))

    def _take(self, message: ToEventLoop) -> None:
        if isinstance(message, RowFetch):
            self._travelling.append((self.round + 1 + message.rows.start % 3, message))
            return
        assert isinstance(message, Answers), message
        for request_id, answer in message.by_request:
            self._note(self._served[request_id], answer)

    def _note(self, served: Served, answer: Answer) -> None:
        assert served.end is None, "an answer behind the end"
        if isinstance(answer, RequestOutput):
            served.token_ids += answer.token_ids
            served.logprobs += answer.logprobs
            served.end = answer.finish_reason
            if answer.usage is not None:
                served.usage = answer.usage
                assert answer.usage.completion_tokens == len(served.token_ids)
        else:
            served.end = answer

    def _launch(self, launch, output: SchedulerOutput) -> PendingStep:  # type: ignore[no-untyped-def]
        """Launches a step, which fails if the workload says so, and counts which steps overlap."""
        fails_at_launch, self._fails_at = self._fails_at, None
        pending: PendingStep = launch(output)
        if output.chunks and fails_at_launch is not None:
            if fails_at_launch:
                raise ValueError("secret inner detail")
            failing = FailingTokens()
            failing.may_run_ahead = pending.may_run_ahead
            return failing
        self.num_launches += bool(output.chunks)
        self.num_ahead += bool(output.chunks) and self._loop._in_flight is None and self._num_unread > 0
        tokens = pending.tokens
        self._num_unread += 1

        def read() -> list[SampledToken]:
            self._num_unread -= 1
            return tokens()

        vars(pending)["tokens"] = read
        return pending


def random_workload(model: offline.OfflineModel, seed: int, answers: dict[str, list[int]] | None = None) -> Workload:
    """Returns requests with the model's prompts, or beginnings of them, some equal, with mishaps.

    `answers` are greedy answers by prompt, from which stop ids are taken.
    """
    rng = random.Random(seed)
    asked = []
    for index in range(rng.randint(4, 12)):
        question = rng.choice(model.questions)
        params = _params(rng)
        if rng.random() < 0.5:
            params = replace(params, stop_token_ids=frozenset({rng.choice(question.expected)}))
        asked.append(Asked(RequestId(f"r{index}"), question.prompt, params, rng.randint(0, 12)))
    names = [one.request_id for one in asked]
    return Workload(
        asked,
        aborts={rng.randint(1, 30): rng.choice(names) for _ in range(rng.randint(0, 3))},
        failures={rng.randint(1, 30): rng.random() < 0.5 for _ in range(rng.choice((0, 0, 1, 2)))},
        forgetting={rng.randint(1, 30) for _ in range(rng.choice((0, 0, 1)))},
    )


def _params(rng: random.Random) -> SamplingParams:
    params = SamplingParams(max_tokens=rng.randint(1, 14), min_tokens=rng.choice((0, 0, 3)), seed=rng.randrange(99))
    kind = rng.randrange(6)
    if kind == 1:
        return replace(params, temperature=1.0, top_k=20)
    if kind == 2:
        return replace(params, temperature=1.3, top_p=0.95)
    if kind == 3:
        return replace(params, repetition_penalty=1.3, frequency_penalty=0.4)
    if kind == 4:
        return replace(params, logprobs=rng.choice((0, 2)))
    return params
