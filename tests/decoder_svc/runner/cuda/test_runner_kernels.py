"""The CUDA runner with its Triton kernels in Triton's interpreter, in steps with and without graphs."""

from __future__ import annotations

import logging
import pathlib
from dataclasses import replace

import pytest
import torch

from decoder_svc.runner.cuda.runner import GPUModelRunner
from tests import tiny_models
from tests.decoder_svc.runner.cuda.fake_cuda import installed
from tests.decoder_svc.runner.cuda.interpreted_triton import TritonBackend, fused_stack, triton_attention, triton_layers
from tests.decoder_svc.runner.cuda.simulated_device import PINNED, RESULT, RETURN
from tests.parity import families, offline
from tests.tiny_families import FAMILIES


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> offline.OfflineModel:
    folder = tiny_models.build_llava_clip(tmp_path_factory.mktemp("models") / "llava")
    return offline.build(folder, num_prompts=2, images_per_prompt=(0, 1))


@pytest.mark.parametrize("use_graphs", [True, False])
def test_answers_are_the_references(reference: offline.OfflineModel, use_graphs: bool) -> None:
    num_threads = torch.get_num_threads()
    config = replace(reference.runner.config, max_num_seqs=2, use_graphs=use_graphs)
    with installed(triton_attention, triton_layers) as cuda:
        model = replace(reference, runner=GPUModelRunner(config, reference.runner.family))
        assert isinstance(model.runner.backend, TritonBackend)
        assert type(model.runner.get_model().model.language_model).__name__ == "FusedStack"
        session = offline.Session(model, num_blocks=60)
        model.runner.capture_model()
        assert (model.runner.graphs is not None) == use_graphs
        before = cuda.device.num_launches
        answers = session.ask([question.prompt for question in model.questions])
        assert cuda.device.num_launches > before
    torch.set_num_threads(num_threads)
    assert answers.token_ids == [question.expected for question in model.questions]


# Queries and keys with biases and three position axes; with norms of heads and feature levels; with a window.
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "mistral3"])
def test_other_families_have_a_fused_stack_and_the_references_answers(name: str, tmp_path: pathlib.Path) -> None:
    num_threads = torch.get_num_threads()
    family = families.build(FAMILIES[name], tmp_path / name).offline
    config = replace(family.runner.config, max_num_seqs=2, use_graphs=False)
    with installed(triton_attention, triton_layers) as cuda:
        model = replace(family, runner=GPUModelRunner(config, family.runner.family))
        assert type(model.runner.get_model().model.language_model).__name__ == "FusedStack"
        session = offline.Session(model, num_blocks=200)
        question = min(
            (question for question in model.questions if question.prompt.images),
            key=lambda question: len(question.prompt.token_ids),
        )
        with cuda.device.noting() as events:
            answers = session.ask([question.prompt])
    torch.set_num_threads(num_threads)
    assert answers.token_ids == [question.expected]
    assert {event.kind for event in events} == {PINNED, RESULT, RETURN}, "no step waits for the device early"


def test_a_stack_with_other_results_is_not_used(
    reference: offline.OfflineModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_threads = torch.get_num_threads()
    config = replace(reference.runner.config, max_num_seqs=2, use_graphs=False)
    with installed(triton_attention, triton_layers), caplog.at_level(logging.INFO):
        right = triton_layers.gated
        monkeypatch.setattr(fused_stack, "gated", lambda merged: right(merged) * 1.01)
        runner = GPUModelRunner(config, reference.runner.family)
        assert "the fused stack differs by" in caplog.text
        model = replace(reference, runner=runner)
        assert type(runner.get_model().model.language_model).__name__ == "LlamaModel"
        question = reference.questions[0]
        assert offline.Session(model, num_blocks=60).ask([question.prompt]).token_ids == [question.expected]
    torch.set_num_threads(num_threads)
