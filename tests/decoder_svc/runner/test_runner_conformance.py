"""Every device's runner gives the tokens of Hugging Face `generate`, for steps of any shape.

A device is one entry of RUNNERS. Two of them represent new devices, which override only what a device must: `third` has
graphs, and `fixed`, the example of docs/adding-a-device.md, refuses steps that are not padded to its numbers of tokens.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.cuda.runner import GPUModelRunner
from decoder_svc.runner.worst_case import WorstCase
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.scheduler_output import SchedulerOutput
from lookonce.embedding_meta import RowDtype
from lookonce.families.base import Mask
from tests import tiny_models
from tests.decoder_svc.runner.recording_runner import RecordingRunner
from tests.example_device.fixed_steps.runner import FixedStepsRunner
from tests.parity import families, offline

RUNNERS: dict[str, type[ModelRunnerBase]] = {
    "cpu": CPUModelRunner,
    "cuda": GPUModelRunner,
    "third": RecordingRunner,
    "fixed": FixedStepsRunner,
}
# The methods that a device must override.
HOOKS = {"_cache_device_properties", "load_model", "profile_run", "capture_model"}
# The method that a device with fixed numbers of tokens overrides as well.
PADDING_HOOK = "_padded_num_tokens"
# Families with plain positions; with three position axes; with feature levels; with a window and mutual spans; and with
# prompts that see themselves beyond the window and soft-capped scores.
FAMILY_NAMES = ("llava_clip", "qwen2_vl", "qwen3_vl", "gemma3", "gemma4", "paligemma2")
# Token budget of a step that cuts prompts wherever cutting is allowed.
SMALL_STEP = 23
TOLERANCE = 1e-4
# All questions at once, and some to spare: attention of `third` reads the whole pool for each token of a graph.
NUM_BLOCKS = 160


@dataclass(frozen=True, slots=True)
class Subject:
    """One device's runner with one family's model, and the questions to it."""

    folder: pathlib.Path
    model: offline.OfflineModel
    prompts: list[Prompt]
    expected: list[list[int]]

    @property
    def runner(self) -> ModelRunnerBase:
        """The runner of the device under test."""
        return self.model.runner

    def session(
        self,
        *,
        max_num_batched_tokens: int = 2048,
        num_blocks: int = NUM_BLOCKS,
        cache_rows: int = 400,
        rows_arrive_after: int = 0,
    ) -> offline.Session:
        """Returns a session with a fresh KV cache, and graphs if the device has any."""
        session = offline.Session(
            self.model,
            max_num_batched_tokens=max_num_batched_tokens,
            num_blocks=num_blocks,
            cache_rows=cache_rows,
            rows_arrive_after=rows_arrive_after,
        )
        self.runner.capture_model()
        assert (self.runner.graphs is not None) == bool(self.runner.tokenwise_graph_batch_sizes)
        return session

    @property
    def small_step(self) -> int:
        """Returns the smallest token budget with which the prompts can be served in cut steps."""
        return max([SMALL_STEP, *(span.length for prompt in self.prompts for span in prompt.mutual_spans)])


@pytest.fixture(scope="module")
def subjects(tiny_family: Callable[[str], families.Conformance]) -> Callable[[str, str], Subject]:
    @functools.cache
    def subject(device: str, name: str) -> Subject:
        family = tiny_family(name)
        made = RUNNERS[device](family.offline.runner.config, family.offline.runner.family)
        model = replace(family.offline, runner=made)
        questions = family.offline.questions
        return Subject(
            family.offline.runner.config.folder,
            model,
            [question.prompt for question in questions],
            [question.expected for question in questions],
        )

    return subject


@pytest.fixture(params=RUNNERS)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    return str(request.param)


@pytest.fixture(params=FAMILY_NAMES)
def subject(request: pytest.FixtureRequest, device: str, subjects: Callable[[str, str], Subject]) -> Subject:
    return subjects(device, request.param)


@pytest.fixture
def llava(device: str, subjects: Callable[[str, str], Subject]) -> Subject:
    return subjects(device, "llava_clip")


def test_chunks_of_prompts_and_single_tokens_in_one_step(subject: Subject) -> None:
    session = subject.session(max_num_batched_tokens=subject.small_step)
    assert session.ask(subject.prompts).token_ids == subject.expected
    lengths = [{chunk.num_tokens for chunk in step.chunks} for step in session.steps]
    assert any(1 in each and max(each) > 1 for each in lengths), "steps are mixed"


def test_rows_arrive_late_and_in_ranges(subject: Subject) -> None:
    """There is room for little more than the largest image's rows, so later ranges evict earlier ones."""
    most = max(len(rows) for rows in subject.model.rows.values())
    if subject.runner.family.mask is not Mask.CAUSAL:
        # A prompt that sees itself needs all its images at the same time.
        most = max(sum(item.num_rows for item in prompt.images) for prompt in subject.prompts)
    session = subject.session(max_num_batched_tokens=subject.small_step, cache_rows=most + 8, rows_arrive_after=2)
    assert session.ask(subject.prompts).token_ids == subject.expected
    if subject.runner.family.mask is Mask.CAUSAL:
        fetched = [fetch for step in session.steps for fetch in step.fetches]
        assert any(len(fetch.rows) < fetch.num_image_rows for fetch in fetched), "some came in parts"


def test_preempted(subject: Subject) -> None:
    session = subject.session(num_blocks=families.few_blocks(subject.prompts))
    assert session.ask(subject.prompts).token_ids == subject.expected
    assert sum(len(step.admitted) for step in session.steps) > len(subject.prompts), "somebody came back"


def test_all_at_once_and_then_from_the_prefix_cache(subject: Subject) -> None:
    session = subject.session()
    assert session.ask(subject.prompts).token_ids == subject.expected
    num_steps = len(session.steps)
    again = session.ask(subject.prompts)
    assert again.token_ids == subject.expected
    assert all(request.usage.cached_prompt_tokens > 0 for request in again.requests)
    # Requests whose whole prompt is cached start with a single token, which is not written.
    is_single = [chunk.num_tokens == 1 for step in session.steps[num_steps:] for chunk in step.chunks]
    assert any(is_single)


def test_logits_are_those_of_the_whole_model(llava: Subject) -> None:
    """Compares the log probabilities of the five most likely tokens at each position, for prompts without an image."""
    reference = tiny_models.load_model(llava.folder)
    prompts = [prompt for prompt in llava.prompts if not prompt.images]
    answers = llava.session(max_num_batched_tokens=SMALL_STEP).ask(prompts, logprobs=5)
    for prompt, token_ids, places in zip(prompts, answers.token_ids, answers.logprobs, strict=True):
        ids = torch.tensor([[*prompt.token_ids, *token_ids]])
        with torch.inference_mode():
            logits = reference(input_ids=ids).logits[0, len(prompt.token_ids) - 1 : -1]
        for token_id, place, row in zip(token_ids, places, logits.log_softmax(-1), strict=True):
            assert place is not None
            assert place.top[0][0] == token_id
            ours = torch.tensor([value for _, value in place.top])
            torch.testing.assert_close(ours, row[[each for each, _ in place.top]], rtol=0, atol=TOLERANCE)


def test_the_dummy_run_leaves_nothing_behind(subject: Subject) -> None:
    row_elements = (1 + subject.runner.family.num_levels) * tiny_models.HIDDEN_SIZE
    worst = WorstCase(64, 4, 300, 3, 16, row_elements, RowDtype.FLOAT32)
    # A session without rows of earlier runs.
    subject.session()
    assert subject.runner.profile_run(worst) > 0
    assert len(subject.runner.batch) == 0
    assert len(subject.runner.row_cache) == 0
    assert subject.session().ask(subject.prompts[:3]).token_ids == subject.expected[:3]


def test_an_empty_step_is_fine(llava: Subject) -> None:
    session = llava.session()
    assert llava.runner.execute_model(session.scheduler.schedule()) == []


@pytest.mark.parametrize("kind", RUNNERS.values(), ids=RUNNERS)
def test_a_device_overrides_four_methods_and_nothing_else(kind: type[ModelRunnerBase]) -> None:
    shared = {name for name, value in vars(ModelRunnerBase).items() if callable(value)}
    assert {name for name in vars(kind) if name in shared} == HOOKS | ({PADDING_HOOK} & set(vars(kind)))
    assert ModelRunnerBase.__abstractmethods__ == HOOKS


def test_the_example_device_consists_of_the_four_methods_and_the_padding_hook() -> None:
    named = {name for name in vars(FixedStepsRunner) if not name.startswith("__")}
    assert named - {"_abc_impl"} == HOOKS | {PADDING_HOOK}
    assert FixedStepsRunner.__init__ is ModelRunnerBase.__init__
    assert FixedStepsRunner.__bases__ == (ModelRunnerBase,)


@pytest.fixture
def recording(subjects: Callable[[str, str], Subject]) -> Iterator[Subject]:
    subject = subjects("third", "llava_clip")
    yield subject
    subject.runner.config = replace(subject.runner.config, use_graphs=True)


def expected_replay(runner: ModelRunnerBase, step: SchedulerOutput) -> int | None:
    """Returns the rows of logits of the graph that computes a step, or None for a step without."""
    num_tokens = sum(chunk.num_tokens for chunk in step.chunks)
    most = max(runner.tokenwise_graph_batch_sizes)
    is_decode = num_tokens == len(step.chunks)
    sizes = runner.tokenwise_graph_batch_sizes if is_decode else runner.chunk_graph_sizes
    size = next((size for size in sizes if size >= num_tokens), None)
    return None if size is None or len(step.chunks) > most else min(size, most)


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "kinds"),
    [(SMALL_STEP, {1, 2, 4, 8}), (2048, {8, None})],
    ids=["all steps fit", "at first too many tokens and sequences"],
)
def test_graphs_are_replayed_for_all_steps_that_they_hold(
    recording: Subject, max_num_batched_tokens: int, kinds: set[int | None]
) -> None:
    runner = recording.runner
    assert isinstance(runner, RecordingRunner)
    session = recording.session(max_num_batched_tokens=max_num_batched_tokens)
    runner.replayed.clear()
    assert session.ask(recording.prompts).token_ids == recording.expected
    replays = [expected_replay(runner, step) for step in session.steps if step.chunks]
    assert runner.replayed == [size for size in replays if size is not None]
    assert set(replays) == kinds


def test_a_graph_gives_the_bits_of_the_same_step_without(recording: Subject) -> None:
    """With four sequences there is no padding, so the same operators run on the same shapes."""
    runner = recording.runner
    sizes, runner.chunk_graph_sizes = runner.chunk_graph_sizes, ()
    prompts = recording.prompts[:4]
    with_graphs = recording.session().ask(prompts, logprobs=5)
    runner.chunk_graph_sizes = sizes
    runner.config = replace(runner.config, use_graphs=False)
    without = offline.Session(recording.model, num_blocks=NUM_BLOCKS)
    runner.capture_model()
    assert runner.graphs is None
    eager = without.ask(prompts, logprobs=5)
    assert eager.token_ids == with_graphs.token_ids
    assert eager.logprobs == with_graphs.logprobs


def test_a_graph_of_chunks_gives_the_bits_of_the_same_pass_at_once(recording: Subject) -> None:
    runner = recording.runner
    assert isinstance(runner, RecordingRunner)
    prompts = recording.prompts[:6]
    recorded = recording.session(max_num_batched_tokens=SMALL_STEP).ask(prompts, logprobs=5)
    runner.records = False
    at_once = recording.session(max_num_batched_tokens=SMALL_STEP).ask(prompts, logprobs=5)
    runner.records = True
    assert at_once.token_ids == recorded.token_ids
    assert at_once.logprobs == recorded.logprobs


def test_graphs_can_be_recorded_over_a_pool_that_is_smaller_than_a_graph(recording: Subject) -> None:
    """Start-up measures their memory so."""
    recording.runner.initialize_kv_cache(1)
    recording.runner.capture_model()
    assert recording.runner.graphs is not None
    assert recording.runner.graphs.sizes.chunks == recording.runner.chunk_graph_sizes


def test_graphs_of_an_earlier_cache_are_forgotten(recording: Subject) -> None:
    """Old graphs hold the addresses of the old pools."""
    recording.session()
    runner = recording.runner
    assert runner.graphs is not None
    runner.initialize_kv_cache(10)
    assert runner.graphs is None


def test_a_backend_that_reads_metadata_on_the_host_is_not_recorded(
    recording: Subject, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(type(recording.runner.backend), "reads_tensors", False)
    recording.runner.initialize_kv_cache(10)
    recording.runner.capture_model()
    assert recording.runner.graphs is None
    assert "reads step metadata on the host" in caplog.text


def test_a_model_that_reads_tensor_values_on_the_host_is_not_recorded(
    recording: Subject, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    head = recording.runner.get_model().lm_head
    right = head.forward
    # Like a mixture of experts that reads the number of tokens per expert.
    monkeypatch.setattr(head, "forward", lambda hidden: right(hidden) * int(hidden.isfinite().any()))
    session = offline.Session(recording.model, num_blocks=NUM_BLOCKS)
    recording.runner.capture_model()
    assert recording.runner.graphs is None
    assert "cannot be recorded" in caplog.text
    assert session.ask(recording.prompts[:2]).token_ids == recording.expected[:2]
