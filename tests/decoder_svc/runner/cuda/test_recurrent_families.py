"""The CUDA runner with families that have recurrent layers, on the simulated device, with kernels and without."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from decoder_svc.runner.cuda.runner import GPUModelRunner
from decoder_svc.runner.recurrent.recurrent_layers import RecurrentKernels
from decoder_svc.runner.worst_case import WorstCase
from lookonce.embedding_meta import RowDtype
from tests.decoder_svc.runner.cuda.fake_cuda import installed
from tests.decoder_svc.runner.cuda.interpreted_triton import (
    triton_attention,
    triton_penalties,
    triton_recurrent,
    triton_writes,
)
from tests.decoder_svc.runner.cuda.simulated_device import PINNED, RESULT, RETURN
from tests.parity import families, offline
from tests.parity.test_family_conformance import RECURRENT
from tests.tiny_families import FAMILIES as TINY_FAMILIES

# Steps take up to a second in the interpreter.
NUM_TOKENS = 3
INTERVAL = 2
# The experts of a mixture cannot be counted on the simulated device.
FAMILIES = sorted(RECURRENT - {"qwen3_5_moe", "nemotron_h_omni"})
# Needs torchvision.
MAMBA2 = ["nemotron_h_omni"]

TinyFamily = Callable[[str], families.Conformance]


def session_of(family: offline.OfflineModel, *, use_graphs: bool) -> tuple[offline.Session, GPUModelRunner]:
    """Returns a session with a runner of the simulated device, and the runner."""
    config = replace(family.runner.config, max_num_seqs=2, max_num_batched_tokens=32, use_graphs=use_graphs)
    runner = GPUModelRunner(config, family.runner.family)
    session = offline.Session(
        replace(family, runner=runner),
        num_blocks=60,
        max_num_batched_tokens=32,
        max_num_seqs=2,
        num_snapshots=12,
        snapshot_interval=INTERVAL,
    )
    runner.capture_model()
    return session, runner


def without_experts(name: str, folder: pathlib.Path) -> offline.OfflineModel:
    """Returns a model of this family whose layers are two of Mamba2 with few heads, an MLP and an attention."""
    tiny = TINY_FAMILIES[name]
    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention"]
    text = {"layers_block_type": kinds, "mamba_num_heads": 2, "mamba_head_dim": 16}
    return families.build(tiny, tiny.build(folder, text=text), 2).offline


def short_questions(family: offline.OfflineModel) -> list[offline.Question]:
    """Returns the shortest question with an image, and the shortest one without."""
    questions = sorted(family.questions, key=lambda question: len(question.prompt.token_ids))
    return [
        next(each for each in questions if each.prompt.images),
        next(each for each in questions if not each.prompt.images),
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_give_the_references_answers_in_graphs_that_do_not_wait(
    name: str, tiny_family: TinyFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_with_kernels(tiny_family(name).offline, monkeypatch)


@pytest.mark.parametrize("name", MAMBA2)
def test_kernels_give_the_references_answers_of_mamba2_layers(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_with_kernels(without_experts(name, tmp_path), monkeypatch)


def check_with_kernels(family: offline.OfflineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that kernels give the references' answers, in graphs that do not wait, and continue from snapshots."""
    num_threads = torch.get_num_threads()
    questions = short_questions(family)
    expected = [question.expected[:NUM_TOKENS] for question in questions]
    prompts = [question.prompt for question in questions]
    with installed(triton_attention, triton_penalties, triton_recurrent, triton_writes) as cuda:
        session, runner = session_of(family, use_graphs=True)
        assert runner.recurrent is not None
        assert runner.recurrent.have_kernels
        assert runner.graphs is not None
        monkeypatch.setattr(runner, "_forward", lambda *_, **__: pytest.fail("a step without a graph"))
        with cuda.device.noting() as events:
            answers = session.ask(prompts, max_tokens=NUM_TOKENS)
        again = session.ask(prompts[::-1], max_tokens=NUM_TOKENS)
    torch.set_num_threads(num_threads)
    assert answers.token_ids == expected
    assert again.token_ids == expected[::-1]
    assert all(request.usage.cached_prompt_tokens > 0 for request in again.requests), "snapshots are continued"
    assert {event.kind for event in events} <= {PINNED, RESULT, RETURN}, "no step waits for the device early"


@pytest.mark.parametrize("name", FAMILIES)
def test_without_triton_answers_are_the_references_and_no_step_is_recorded(
    name: str, tiny_family: TinyFamily, caplog: pytest.LogCaptureFixture
) -> None:
    check_without_triton(tiny_family(name).offline, caplog)


@pytest.mark.parametrize("name", MAMBA2)
def test_without_triton_answers_of_mamba2_layers_are_the_references(
    name: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_without_triton(without_experts(name, tmp_path), caplog)


def check_without_triton(family: offline.OfflineModel, caplog: pytest.LogCaptureFixture) -> None:
    """Asserts that operators of PyTorch give the references' answers, and that the log says why they compute."""
    num_threads = torch.get_num_threads()
    questions = short_questions(family)
    with installed(), caplog.at_level(logging.WARNING):
        session, runner = session_of(family, use_graphs=True)
        assert runner.graphs is None
        answers = session.ask([question.prompt for question in questions], max_tokens=NUM_TOKENS)
        again = session.ask([question.prompt for question in questions], max_tokens=NUM_TOKENS)
    torch.set_num_threads(num_threads)
    assert "recurrent layers: operators of PyTorch, and no graphs: Triton cannot be imported" in caplog.text
    assert answers.token_ids == again.token_ids == [question.expected[:NUM_TOKENS] for question in questions]


@pytest.mark.parametrize("kernel", ["convolve", "_delta"])
def test_kernels_with_other_results_are_not_used(
    kernel: str, tiny_family: TinyFamily, caplog: pytest.LogCaptureFixture
) -> None:
    check_refusal(kernel, tiny_family("qwen3_5").offline, caplog)


@pytest.mark.parametrize("kernel", ["convolve", "_scan"])
@pytest.mark.parametrize("name", MAMBA2)
def test_kernels_of_mamba2_layers_with_other_results_are_not_used(
    name: str, kernel: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_refusal(kernel, without_experts(name, tmp_path), caplog)


def check_refusal(kernel: str, family: offline.OfflineModel, caplog: pytest.LogCaptureFixture) -> None:
    """Asserts that a wrong convolution, or a recurrence that fails, is not used, and that the log says why."""
    num_threads = torch.get_num_threads()
    with (
        installed(triton_attention, triton_penalties, triton_recurrent, triton_writes),
        caplog.at_level(logging.WARNING),
        # Undone before the simulated device puts the real kernels back.
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        if kernel == "convolve":
            right = triton_recurrent.convolve
            monkeypatch.setattr(triton_recurrent, "convolve", lambda *args, **kwargs: right(*args, **kwargs) * 1.01)
        else:
            monkeypatch.setattr(triton_recurrent, kernel, None)
        session, runner = session_of(family, use_graphs=False)
        assert runner.recurrent_kernels == RecurrentKernels()
        question = short_questions(family)[1]
        answers = session.ask([question.prompt], max_tokens=NUM_TOKENS)
    torch.set_num_threads(num_threads)
    is_wrong = kernel == "convolve"
    reason = "they compute other numbers on this device" if is_wrong else "they fail on this device"
    assert f"recurrent layers: operators of PyTorch, and no graphs: {reason}" in caplog.text
    assert answers.token_ids == [question.expected[:NUM_TOKENS]]


def test_nothing_is_compiled_while_serving(tiny_family: TinyFamily) -> None:
    num_threads = torch.get_num_threads()
    family = tiny_family("qwen3_5").offline
    with installed(triton_attention, triton_penalties, triton_recurrent, triton_writes) as cuda:
        config = replace(family.runner.config, max_num_seqs=2, use_graphs=False)
        runner = GPUModelRunner(config, family.runner.family)
        runner.profile_run(WorstCase(4, 2, 4, 0, 0, 1, RowDtype.FLOAT32))
        compiled = set(cuda.device.variants)
        session = offline.Session(
            replace(family, runner=runner), num_blocks=300, num_snapshots=12, snapshot_interval=INTERVAL
        )
        prompts = [question.prompt for question in short_questions(family)]
        answers = session.ask(prompts, max_tokens=NUM_TOKENS)
        assert session.ask(prompts, max_tokens=NUM_TOKENS).token_ids == answers.token_ids
    torch.set_num_threads(num_threads)
    assert cuda.device.variants - compiled == set()
