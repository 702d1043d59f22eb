"""The CUDA runner with its Triton kernels in Triton's interpreter, in steps with and without graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from decoder_svc.runner.cuda.runner import GPUModelRunner
from decoder_svc.runner.worst_case import WorstCase
from decoder_svc.scheduling.sampling_params import SamplingParams
from lookonce.embedding_meta import RowDtype
from tests import tiny_models
from tests.decoder_svc.runner.cuda.fake_cuda import installed
from tests.decoder_svc.runner.cuda.interpreted_triton import (
    TritonBackend,
    fused_stack,
    triton_attention,
    triton_layers,
    triton_penalties,
    triton_rowwise,
    triton_writes,
)
from tests.decoder_svc.runner.cuda.simulated_device import PINNED, RESULT, RETURN
from tests.parity import families, offline

# The prompt's step and two steps of single tokens: in the interpreter each step takes a second.
NUM_TOKENS = 3


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> offline.OfflineModel:
    folder = tiny_models.build_llava_clip(tmp_path_factory.mktemp("models") / "llava")
    return offline.build(folder, num_prompts=2, images_per_prompt=(0, 1))


def test_answers_are_the_references(reference: offline.OfflineModel) -> None:
    num_threads = torch.get_num_threads()
    config = replace(reference.runner.config, max_num_seqs=2, max_num_batched_tokens=16)
    with installed(triton_attention, triton_layers, triton_penalties, triton_rowwise, triton_writes) as cuda:
        model = replace(reference, runner=GPUModelRunner(config, reference.runner.family))
        assert isinstance(model.runner.backend, TritonBackend)
        assert type(model.runner.get_model().model.language_model).__name__ == "FusedStack"
        # The longer prompt, which has an image, is asked once.
        for use_graphs, questions in ((True, model.questions), (False, model.questions[:1])):
            model.runner.config = replace(model.runner.config, use_graphs=use_graphs)
            session = offline.Session(model, num_blocks=60)
            model.runner.capture_model()
            assert (model.runner.graphs is not None) == use_graphs
            before = cuda.device.num_launches
            answers = session.ask([question.prompt for question in questions], max_tokens=NUM_TOKENS)
            assert cuda.device.num_launches > before
            assert answers.token_ids == [question.expected[:NUM_TOKENS] for question in questions]
    torch.set_num_threads(num_threads)


# Queries and keys with biases and three position axes; with norms of heads and feature levels, which graphs of chunks
# take as well; with a window.
@pytest.mark.parametrize(("name", "use_graphs"), [("qwen2_vl", False), ("qwen3_vl", True), ("mistral3", False)])
def test_other_families_have_a_fused_stack_and_the_references_answers(
    name: str, use_graphs: bool, tiny_family: Callable[[str], families.Conformance], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_threads = torch.get_num_threads()
    family = tiny_family(name).offline
    config = replace(family.runner.config, max_num_seqs=2, max_num_batched_tokens=16, use_graphs=use_graphs)
    with installed(triton_attention, triton_layers, triton_penalties, triton_rowwise, triton_writes) as cuda:
        model = replace(family, runner=GPUModelRunner(config, family.runner.family))
        assert type(model.runner.get_model().model.language_model).__name__ == "FusedStack"
        session = offline.Session(model, num_blocks=200, max_num_batched_tokens=16 if use_graphs else 2048)
        model.runner.capture_model()
        if use_graphs:
            monkeypatch.setattr(model.runner, "_forward", lambda *_, **__: pytest.fail("a step without a graph"))
        question = min(
            (question for question in model.questions if question.prompt.images),
            key=lambda question: len(question.prompt.token_ids),
        )
        with cuda.device.noting() as events:
            answers = session.ask([question.prompt], max_tokens=NUM_TOKENS)
    torch.set_num_threads(num_threads)
    assert answers.token_ids == [question.expected[:NUM_TOKENS]]
    assert {event.kind for event in events} == {PINNED, RESULT, RETURN}, "no step waits for the device early"


# A family without mutual spans; one with spans of images and a sliding group; and one whose prompts are spans.
@pytest.mark.parametrize("name", ["llava_clip", "gemma3", "gemma4", "paligemma2"])
def test_nothing_is_compiled_while_serving(name: str, tiny_family: Callable[[str], families.Conformance]) -> None:
    num_threads = torch.get_num_threads()
    family = tiny_family(name).offline
    config = replace(family.runner.config, max_num_seqs=2, use_graphs=False)
    with installed(triton_attention, triton_layers, triton_penalties, triton_rowwise, triton_writes) as cuda:
        model = replace(family, runner=GPUModelRunner(config, family.runner.family))
        model.runner.profile_run(WorstCase(4, 2, 4, 0, 0, 1, RowDtype.FLOAT32))
        compiled = set(cuda.device.variants)
        session = offline.Session(model, num_blocks=300)
        questions = sorted(model.questions, key=lambda question: len(question.prompt.token_ids))
        prompts = [questions[0].prompt, next(each.prompt for each in questions if each.prompt.images)]
        answers = session.ask(prompts, max_tokens=NUM_TOKENS)
        penalised = SamplingParams(max_tokens=NUM_TOKENS, repetition_penalty=1.3, frequency_penalty=0.5)
        session.ask(prompts, params=penalised)
        # Everything is cached now, so prompts compute their last token alone.
        assert session.ask(prompts, max_tokens=NUM_TOKENS).token_ids == answers.token_ids
    torch.set_num_threads(num_threads)
    assert cuda.device.variants - compiled == set()


def test_a_stack_with_other_results_is_not_used(
    reference: offline.OfflineModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_threads = torch.get_num_threads()
    config = replace(reference.runner.config, max_num_seqs=2, max_num_batched_tokens=16, use_graphs=False)
    with (
        installed(triton_attention, triton_layers, triton_penalties, triton_rowwise, triton_writes),
        caplog.at_level(logging.INFO),
    ):
        right = triton_rowwise.gated
        monkeypatch.setattr(fused_stack, "gated", lambda merged: right(merged) * 1.01)
        runner = GPUModelRunner(config, reference.runner.family)
        assert "the fused stack differs by" in caplog.text
        model = replace(reference, runner=runner)
        assert type(runner.get_model().model.language_model).__name__ == "LlamaModel"
        question = reference.questions[0]
        answers = offline.Session(model, num_blocks=60).ask([question.prompt], max_tokens=NUM_TOKENS)
        assert answers.token_ids == [question.expected[:NUM_TOKENS]]
    torch.set_num_threads(num_threads)
