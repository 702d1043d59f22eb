"""The synthetic heaviest step, and start-up that runs it with a tiny model."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.prompt.family import load_family
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.runner_config import RunnerConfig
from decoder_svc.runner.worst_case import NUM_BLOCKS, WorstCase, within_pool, worst_case_rows, worst_case_step
from decoder_svc.scheduling.prompt import Span
from decoder_svc.scheduling.scheduler_output import SampledToken, SchedulerOutput
from decoder_svc.scheduling.window import Window
from lookonce.embedding_meta import RowDtype
from lookonce.errors import ConfigurationError, ModelFolderError
from lookonce.families.base import Mask
from lookonce.model.model_folder import ModelFolder
from tests import tiny_models
from tests.decoder_svc.decoders import running_decoder
from tests.tiny_families import gemma3, paligemma2

BLOCK_SIZE = 8
# The step takes 30 MB. Pages that the process touches for the first time add up to 1 MB to a measurement.
LARGE_STEP_TOKENS = 12288
ROOT = pathlib.Path(__file__).parents[3]


def worst_case(
    num_tokens: int = 64, num_requests: int = 4, context_tokens: int = 300, num_images: int = 3
) -> WorstCase:
    return WorstCase(
        num_tokens, num_requests, context_tokens, num_images, 16, tiny_models.HIDDEN_SIZE, RowDtype.FLOAT32
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.build_llava_clip(tmp_path_factory.mktemp("models") / "llava")


class WatchedRunner(CPUModelRunner):
    """A runner that records the steps that it ran."""

    steps: list[SchedulerOutput]

    def execute_model(self, output: SchedulerOutput) -> list[SampledToken]:
        self.steps.append(output)
        return super().execute_model(output)


def load(folder: pathlib.Path) -> WatchedRunner:
    family = load_family(ModelFolder.open(folder), tiny_models.load_processor(folder).tokenizer)
    WatchedRunner.steps = []
    return WatchedRunner(RunnerConfig(folder, torch.float32, BLOCK_SIZE, num_threads=1), family)


@pytest.fixture(scope="module")
def runner(folder: pathlib.Path) -> WatchedRunner:
    return load(folder)


def test_every_decoding_request_has_its_drafts() -> None:
    worst = replace(worst_case(num_tokens=64, num_requests=5), num_draft_tokens=6)
    step = worst_case_step(worst, BLOCK_SIZE, window=Window(3))
    assert [(chunk.num_tokens, len(chunk.draft_ids)) for chunk in step.chunks] == [(36, 0), *[(7, 6)] * 4]
    # With a small budget every request has fewer drafts, and the longest request has one token.
    step = worst_case_step(replace(worst, num_tokens=14), BLOCK_SIZE)
    assert [(chunk.num_tokens, len(chunk.draft_ids)) for chunk in step.chunks] == [(2, 0), *[(3, 2)] * 4]


@given(
    num_tokens=st.integers(1, 200),
    num_requests=st.integers(1, 20),
    context_tokens=st.integers(2, 300),
    num_drafts=st.integers(0, 9),
)
def test_a_step_with_drafts_stays_within_the_token_budget(
    num_tokens: int, num_requests: int, context_tokens: int, num_drafts: int
) -> None:
    worst = replace(worst_case(num_tokens, num_requests, context_tokens, 0), num_draft_tokens=num_drafts)
    step = worst_case_step(worst, BLOCK_SIZE)
    assert len(step.chunks) == min(num_requests, num_tokens)
    assert step.num_scheduled_tokens <= num_tokens
    assert all(len(chunk.draft_ids) <= num_drafts and chunk.num_tokens > 0 for chunk in step.chunks)


def test_the_runner_runs_a_step_with_drafts(runner: WatchedRunner) -> None:
    assert runner.profile_run(replace(worst_case(), num_draft_tokens=4)) > 0
    # Each chunk with drafts (all zeros) gives some token, and the longest request gives its next one.
    assert any(chunk.draft_ids for step in runner.steps for chunk in step.chunks)


@given(
    num_tokens=st.integers(1, 200),
    num_requests=st.integers(1, 20),
    context_tokens=st.integers(2, 300),
    num_images=st.integers(0, 4),
)
def test_the_step_uses_exactly_the_token_budget(
    num_tokens: int, num_requests: int, context_tokens: int, num_images: int
) -> None:
    worst = worst_case(num_tokens, num_requests, context_tokens, num_images)
    step = worst_case_step(worst, BLOCK_SIZE)
    num_others = min(num_requests, num_tokens) - 1
    assert len(step.chunks) == len(step.admitted) == num_others + 1
    assert step.num_scheduled_tokens == min(num_tokens, context_tokens + num_others)
    longest = step.chunks[0]
    assert longest.start + longest.num_tokens == context_tokens
    assert all(len(chunk.block_ids) * BLOCK_SIZE >= chunk.start + chunk.num_tokens for chunk in step.chunks)
    assert all(chunk.sliding is None for chunk in step.chunks)
    assert {block for chunk in step.chunks for block in chunk.block_ids} == set(range(NUM_BLOCKS))
    keys = [image.key for image in step.admitted[0].images]
    assert keys == [fetched.key for fetched in worst_case_rows(worst)]
    assert len(set(keys)) == num_images


@pytest.mark.parametrize(
    ("free_bytes", "expected"), [(10_000, 300), (1000, 80), (799, 64), (0, 64)], ids=["fits", "pool", "step", "nothing"]
)
def test_a_request_is_no_longer_than_the_memory_of_a_pool_but_fills_its_step(free_bytes: int, expected: int) -> None:
    worst = within_pool(worst_case(num_tokens=64, context_tokens=300), free_bytes, 100, BLOCK_SIZE)
    assert worst == replace(worst_case(), context_tokens=expected)


def test_the_sliding_table_reaches_a_window_back_from_the_first_token() -> None:
    step = worst_case_step(worst_case(num_tokens=20, num_requests=2, context_tokens=100), BLOCK_SIZE, window=Window(10))
    longest, other = (chunk.sliding for chunk in step.chunks)
    # 19 tokens from 81 on; the first of them sees tokens 72 … 81.
    assert longest is not None
    assert (longest.first, longest.start, len(longest.block_ids)) == (9, 9, 4)
    assert other is not None
    assert (other.first, len(other.block_ids)) == (0, 1)


def test_start_up_runs_the_heaviest_step_once_and_keeps_nothing_of_it(runner: WatchedRunner) -> None:
    runner.steps.clear()
    free = runner.profile_run(worst_case())
    assert free > 0
    assert [step.num_scheduled_tokens for step in runner.steps] == [64, 0]
    assert len(runner.batch) == 0
    assert len(runner.row_cache) == 0


def test_tokens_without_a_chance_are_served_and_tokens_without_a_logit_are_not(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models exclude unused rows of their vocabularies with logits of -inf."""
    runner = load(folder)
    added = torch.zeros(runner.model.config.get_text_config().vocab_size)
    forward = runner._forward
    monkeypatch.setattr(runner, "_forward", lambda *arguments, **how: forward(*arguments, **how) + added)
    added[-3:] = -torch.inf
    assert runner.profile_run(worst_case()) > 0
    sampler = runner.sampler
    for value in (torch.nan, torch.inf):
        added[-1] = value
        with pytest.raises(ModelFolderError, match="the language model computes NaN"):
            runner.profile_run(worst_case())
        added[-1] = -torch.inf
        runner.sampler = sampler
    added[:] = -torch.inf
    with pytest.raises(ModelFolderError, match="the language model computes NaN"):
        runner.profile_run(worst_case())


# Each measurement runs in a process of its own: memory that an earlier one released would be reused without being
# measured. The second process is a copy of the first one as it was after the imports.
_PROFILES_TWO_STEPS = """
import contextlib, os, pathlib, sys
from lookonce.model.libraries.lean_transformers import import_lean_transformers
import_lean_transformers()
from decoder_svc.runner.cpu import runner as cpu
from decoder_svc.runner.cpu.native_stack import NativeStack
from lookonce.model.kernels import kernel_trial
from tests.decoder_svc.runner import test_worst_case as tests
from tests.decoder_svc.runner.conftest import native_choices

kernel_trial._choices.update(native_choices())
is_copy = os.fork() == 0
runner = tests.load(pathlib.Path(sys.argv[1]))
cpu.free_bytes = lambda: 1 << 40
stack = runner.model.model.language_model
if is_copy and isinstance(stack, NativeStack):
    assert len(stack.weights()) > 4
    stack.last_layer_only = contextlib.nullcontext
small = runner.profile_run(tests.worst_case(num_tokens=1, num_requests=1, num_images=0))
num_tokens = tests.LARGE_STEP_TOKENS
taken = small - runner.profile_run(tests.worst_case(num_tokens=num_tokens, context_tokens=num_tokens + 1000))
print("all layers" if is_copy else "as profiled", taken, sep=":", flush=True)
sys.exit(0 if is_copy else os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.fixture(scope="module")
def large_step_bytes(folder: pathlib.Path) -> dict[str, int]:
    """Memory that a large step takes beyond one token, as a profile runs it and in all layers."""
    command = [sys.executable, "-c", _PROFILES_TWO_STEPS, str(folder)]
    finished = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, timeout=120)
    lines = (line.split(":") for line in finished.stdout.splitlines())
    return {name: int(taken) for name, taken in lines}


def test_more_tokens_leave_less_memory(large_step_bytes: dict[str, int]) -> None:
    # Hidden states, their projections and the results: at least three buffers per token.
    assert large_step_bytes["as profiled"] > 3 * LARGE_STEP_TOKENS * tiny_models.HIDDEN_SIZE * 4


@pytest.mark.usefixtures("library")
def test_one_layer_takes_as_much_memory_as_all(large_step_bytes: dict[str, int]) -> None:
    """Therefore a memory profile need not run all layers."""
    assert large_step_bytes["as profiled"] == pytest.approx(large_step_bytes["all layers"], rel=0.1)


async def test_a_pool_without_a_set_size_holds_all_requests_at_full_length(folder: pathlib.Path) -> None:
    sizes: dict[str, Any] = {
        "num_kv_blocks": None,
        "max_num_seqs": 3,
        "max_context_tokens": 100,
        "block_size": BLOCK_SIZE,
    }
    async with running_decoder(folder, **sizes) as decoder:
        limits = decoder.service.engine.limits
    assert limits.num_kv_blocks == 3 * 13
    assert limits.max_context_tokens == 100


async def test_a_pool_smaller_than_the_context_shortens_it(folder: pathlib.Path) -> None:
    async with running_decoder(folder, num_kv_blocks=5, block_size=BLOCK_SIZE) as decoder:
        assert decoder.service.engine.limits.max_context_tokens == 5 * BLOCK_SIZE


async def test_layers_with_a_window_get_a_pool_of_their_own(tmp_path: pathlib.Path) -> None:
    folder = gemma3.build(tmp_path)
    sizes: dict[str, Any] = {
        "num_kv_blocks": None,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 40,
        "max_context_tokens": 400,
        "block_size": BLOCK_SIZE,
    }
    async with running_decoder(folder, **sizes) as decoder:
        limits = decoder.service.engine.limits
    assert limits.num_kv_blocks == 3 * 50
    # 9 tokens of the window before a step of 40 tokens, and one more block if they start inside a block.
    assert limits.num_sliding_kv_blocks == 3 * 8
    async with running_decoder(folder, **sizes | {"num_kv_blocks": 10}) as decoder:
        assert decoder.service.engine.limits.num_sliding_kv_blocks == 10


async def test_a_pool_without_room_refuses_to_start(folder: pathlib.Path) -> None:
    sizes: dict[str, Any] = {"num_kv_blocks": None, "kv_cache_memory_bytes": 1 << 16, "block_size": 256}
    with pytest.raises(ConfigurationError, match="no room for 2 blocks"):
        async with running_decoder(folder, **sizes):
            pass


def test_tokens_that_see_later_ones_are_part_of_the_step() -> None:
    """Their kernels are compiled at start-up, and the memory of their masks is measured."""
    worst = replace(worst_case(num_tokens=64, num_requests=2, context_tokens=100, num_images=3), rows_per_image=30)
    assert worst_case_step(worst, BLOCK_SIZE).admitted[0].mutual_spans == ()
    # Such a prompt is never split, so the step has all of it.
    step = worst_case_step(worst, BLOCK_SIZE, window=Window(16), mask=Mask.PROMPT)
    assert step.admitted[0].mutual_spans == (Span(0, 63),)
    assert (step.chunks[0].start, step.chunks[0].num_tokens) == (0, 63)
    # The third image begins inside the context and ends after it.
    of_images = worst_case_step(worst, BLOCK_SIZE, mask=Mask.IMAGE).admitted[0].mutual_spans
    assert of_images == (Span(37, 30), Span(67, 30), Span(97, 3))


def test_the_heaviest_step_of_a_runner_has_the_mask_of_its_family(tmp_path: pathlib.Path) -> None:
    gemma3.build(tmp_path / "gemma3")
    runner = load(tmp_path / "gemma3")
    runner.profile_run(worst_case(num_tokens=64, num_requests=2, context_tokens=100, num_images=1))
    (longest, _) = next(step for step in WatchedRunner.steps if step.admitted).admitted
    assert longest.mutual_spans


async def test_a_model_whose_prompts_are_seen_whole_starts_with_a_window_and_a_long_context(
    tmp_path: pathlib.Path,
) -> None:
    paligemma2.build(tmp_path / "model")
    async with running_decoder(tmp_path / "model", dtype="float32", num_kv_blocks=None, max_context_tokens=None) as one:
        assert one.service.engine.limits.max_context_tokens > 2048
