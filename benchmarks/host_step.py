"""What does the engine's process do on the host in a step of single tokens? `--help` lists the options.

The engine with scheduler, KV cache and a runner with graphs runs on a device that computes nothing: a replay ends at
once, and every token has the id 0. What is left is the work of the host, which a fast device waits for. All times are
processor time of the engine's thread, so other processes hardly change them.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import models, report
from benchmarks.gpu_checks import runner_of
from decoder_svc.constraint.answer_follower import AnswerFollower
from decoder_svc.constraint.folder_vocabulary import folder_vocabulary
from decoder_svc.engine.constraint_desk import ConstraintDesk
from decoder_svc.engine.engine_thread import EngineThread
from decoder_svc.engine.figures import EngineLimits
from decoder_svc.engine.heartbeat import Heartbeat
from decoder_svc.engine.messages import Answers, Stop, ToEventLoop
from decoder_svc.engine.process.codec import encode_for_service
from decoder_svc.runner.attention import PAGED_ATTENTION, LayerOptions
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.cuda.paged_backend import PagedBackend
from decoder_svc.runner.graphs.decode_table import Decoded, graph_batch_sizes
from decoder_svc.runner.paged_step import PagedBlocks, PagedStep
from decoder_svc.runner.worst_case import WorstCase
from decoder_svc.scheduling.encoder_cache_manager import EncoderCacheManager
from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.request_output import RequestOutput
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler import Scheduler
from decoder_svc.scheduling.scheduler_limits import SchedulerLimits
from lookonce.model.half_model import load_text_half

_NAME = "host_step"
_BATCHES = (1, 8, 64)
_BLOCK_SIZE = 16
_PROMPT_TOKENS = 300
_MAX_BATCHED_TOKENS = 2048
# Room for rows of images, of which there are none.
_NUM_ROWS = 16
_NUM_IDS = 97
_TIMEOUT_S = 120.0


class NoAttention(PagedBackend):
    """Attends to nothing: its result is the queries."""

    name = "none"

    def attend_paged(
        self, layer: int, query: Tensor, group: PagedBlocks, step: PagedStep, options: LayerOptions
    ) -> Tensor:
        """Implements PagedBackend.attend_paged without any attention."""
        return query.flatten(1)


class NullRunner(ModelRunnerBase):
    """A device that records steps and computes nothing when they are replayed."""

    overlaps_steps = True

    def _cache_device_properties(self) -> None:
        self.device = torch.device("cpu")
        self.tokenwise_graph_batch_sizes = graph_batch_sizes(self.config.max_num_seqs)

    def load_model(self) -> None:
        """Implements ModelRunnerBase.load_model in main memory."""
        self.model = load_text_half(self.config.folder, self.config.dtype, PAGED_ATTENTION)
        self.backend = NoAttention()

    def profile_run(self, worst: WorstCase) -> int:
        """Implements ModelRunnerBase.profile_run; the benchmark chooses the size of the KV cache."""
        raise NotImplementedError

    def capture_model(self) -> None:
        """Implements ModelRunnerBase.capture_model: a replay gives the result of the recording."""

        def record(function: Callable[[], Decoded]) -> Callable[[], Decoded]:
            decoded = function()
            return lambda: decoded

        self._capture_graphs(record)


@dataclass(frozen=True, slots=True)
class HostStep:
    """The host's time in the steps of one batch, in µs: the mean of each round."""

    batch: int
    step_us: list[float]
    # The mean of each part of a step.
    parts_us: dict[str, list[float]]


class StepTimes:
    """The steps from the one after which every request has a token to the one before the first answer ends."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._num_ended = 0
        self._num_steps = 0
        self._began_s: float | None = None
        self._parts_s: dict[str, float] = {}
        # Mean seconds of a step and of its parts.
        self.step_s = 0.0
        self.parts_s: dict[str, float] = {}
        self.has_ended = threading.Event()

    def begin(self, num_requests: int) -> None:
        """Starts anew, with this many requests."""
        self._num_requests, self._num_ended, self._began_s = num_requests, 0, None
        self.step_s = 0.0
        self.has_ended.clear()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function with its time counted as that of a part."""

        def call(*arguments: Any, **named: Any) -> Any:
            began_s = time.thread_time()
            result = function(*arguments, **named)
            self._parts_s[name] = self._parts_s.get(name, 0.0) + time.thread_time() - began_s
            return result

        return call

    def note(self, answers: Answers) -> None:
        """Takes the answers of a step."""
        outputs = [answer for _, answer in answers.by_request if isinstance(answer, RequestOutput)]
        assert len(outputs) == len(answers.by_request), "a request failed"
        num_ended = sum(output.finish_reason is not None for output in outputs)
        if self._began_s is None and all(output.token_ids for output in outputs) and len(outputs) == self._num_requests:
            self._num_steps, self._parts_s, self._began_s = 0, {}, time.thread_time()
        elif num_ended and self.step_s == 0.0 and self._began_s is not None:
            self.step_s = (time.thread_time() - self._began_s) / self._num_steps
            self.parts_s = {name: seconds / self._num_steps for name, seconds in self._parts_s.items()}
        self._num_steps += 1
        self._num_ended += num_ended
        if self._num_ended == self._num_requests:
            self.has_ended.set()


class HostBench:
    """An engine on the device that computes nothing."""

    def __init__(self, max_batch: int, num_tokens: int) -> None:
        """`num_tokens` is the length of an answer."""
        self._num_tokens = num_tokens
        self._num_runs = 0
        self._times = StepTimes()
        folder = models.demo_model()
        longest = _PROMPT_TOKENS + num_tokens
        num_blocks = max_batch * (-(-longest // _BLOCK_SIZE) + 1)
        runner = runner_of(folder, NullRunner, torch.float32, _BLOCK_SIZE, max_batch)
        runner.initialize_kv_cache(num_blocks)
        runner.capture_model()
        scheduler = Scheduler(
            SchedulerLimits(_MAX_BATCHED_TOKENS, max_batch, longest, _NUM_ROWS),
            KVCacheManager(num_blocks, _BLOCK_SIZE),
            EncoderCacheManager(_NUM_ROWS),
        )
        for owner, name in ((scheduler, "schedule"), (runner, "launch"), (scheduler, "advance"), (scheduler, "update")):
            vars(owner)[name] = self._times.timed(name, getattr(owner, name))
        self._encode = self._times.timed("answers to bytes", encode_for_service)
        vocab = runner.get_model().config.get_text_config().vocab_size
        follower = AnswerFollower(functools.partial(folder_vocabulary, folder), vocab)
        limits = EngineLimits(
            longest, _BLOCK_SIZE, num_blocks, _MAX_BATCHED_TOKENS, max_batch, _NUM_ROWS, _NUM_ROWS, _NUM_ROWS
        )
        self._core = EngineThread(runner, scheduler, limits, Heartbeat(_TIMEOUT_S), ConstraintDesk(follower))
        self._core.start(self._take)

    def run(self, batch: int) -> StepTimes:
        """Runs one batch to its end."""
        self._num_runs += 1
        self._times.begin(batch)
        params = SamplingParams(max_tokens=self._num_tokens)
        for index in range(batch):
            # Each prompt is another one: nothing is found in the prefix cache.
            ids = tuple((self._num_runs * 7919 + index * 31 + place) % _NUM_IDS for place in range(_PROMPT_TOKENS))
            name = RequestId(f"{self._num_runs}-{index}")
            self._core.put(Request(name, Prompt(ids), params, arrival_s=time.monotonic()))
        if not self._times.has_ended.wait(_TIMEOUT_S):
            raise TimeoutError("the engine gave no answers")
        return self._times

    def close(self) -> None:
        """Ends the engine and waits for its thread."""
        self._core.put(Stop())
        self._core.join(_TIMEOUT_S)

    def _take(self, message: ToEventLoop) -> None:
        """Runs on the engine's thread, where an engine with a process of its own encodes its answers."""
        if isinstance(message, Answers):
            self._encode(message)
            self._times.note(message)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per answer (default: %(default)s)")
    report.add_quick(parser)
    arguments = parser.parse_args(argv)
    batches: tuple[int, ...] = _BATCHES
    if arguments.quick:
        arguments.rounds, arguments.tokens, batches = 1, 6, (1, 4)
    steps = measure(batches, arguments.rounds, arguments.tokens)
    report.publish(_NAME, {"steps": [asdict(each) for each in steps]}, section(steps), is_quick=arguments.quick)


def measure(batches: Sequence[int], num_rounds: int, num_tokens: int) -> list[HostStep]:
    """Runs all batches in turn, round after round, after one round to warm up."""
    found = {batch: HostStep(batch, [], {}) for batch in batches}
    bench = HostBench(max(batches), num_tokens)
    for number in range(num_rounds + 1):
        for batch, step in found.items():
            times = bench.run(batch)
            if number:
                step.step_us.append(times.step_s * 1e6)
                for name, seconds in times.parts_s.items():
                    step.parts_us.setdefault(name, []).append(seconds * 1e6)
    bench.close()
    return list(found.values())


def section(steps: Sequence[HostStep]) -> str:
    """Returns the Markdown of this section of RESULTS.md."""
    names = list(steps[-1].parts_us)
    rows = [
        [
            step.batch,
            f"{statistics.median(step.step_us):.0f}",
            f"{min(step.step_us):.0f} … {max(step.step_us):.0f}",
            *(f"{statistics.median(step.parts_us[name]):.0f}" for name in names),
        ]
        for step in steps
    ]
    question = (
        f"## {_NAME}\n\nWhat does the engine's process do on the host in a step of single tokens? Processor time of "
        "the engine's thread on\na device that computes nothing. An H100 takes 2,100 µs for a step of 1 request, and "
        "3,030 for one of 64\n(`benchmarks.gpu`, 2 billion weights): a host that takes longer slows it down."
    )
    return f"{question}\n\n{report.table(['requests', 'µs per step', 'least … most', *names], rows)}"


if __name__ == "__main__":
    main()
