"""The CUDA runner on the simulated device, with every kind of family: nothing mixes host and device."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from decoder_svc.runner.cuda.runner import GPUModelRunner
from tests import tiny_models
from tests.decoder_svc.runner.cuda.fake_cuda import installed
from tests.decoder_svc.runner.cuda.interpreted_triton import triton_attention, triton_penalties, triton_writes
from tests.decoder_svc.runner.cuda.simulated_device import PINNED, RESULT, RETURN
from tests.parity import families, offline
from tests.tiny_families import FAMILIES, mistral4, step3p7

# All questions at once, and some to spare: the fake's attention reads the whole pool for each token of a graph.
NUM_BLOCKS = 40


# Three position axes; feature levels; a window and mutual spans; embeddings from beside the table and sparse
# activations; prompts that see themselves and soft-capped scores.
NAMES = FAMILIES.keys() & {"qwen2_vl", "qwen3_vl", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "paligemma2"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_answers_are_the_references_and_steps_do_not_wait(
    name: str, tiny_family: Callable[[str], families.Conformance]
) -> None:
    # transformers' modules select tokens of images by a mask. A fused stack does not.
    waiting = {"aten.index.Tensor", "aten.index_put_.default"} if name == "qwen3_vl" else set()
    check(tiny_family(name).offline, waiting)


LATENT = sorted(FAMILIES.keys() & {"mistral4"})


@pytest.mark.parametrize("name", LATENT)
def test_answers_from_latents_are_the_references(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(without_experts(name, tmp_path, monkeypatch), set())


@pytest.mark.parametrize("name", LATENT)
def test_our_kernel_gives_the_references_answers_from_latents(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps take up to a second in the interpreter, so there are few of them, and few graphs."""
    family = without_experts(name, tmp_path, monkeypatch)
    modules = (triton_attention, triton_penalties, triton_writes)
    check(family, set(), modules, num_questions=1, max_num_seqs=1, max_num_batched_tokens=32, max_tokens=3)


def without_experts(name: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> offline.OfflineModel:
    """Returns a model with latents that has no experts, which read on the host which tokens they have."""
    monkeypatch.setitem(mistral4.LATENT, "first_k_dense_replace", tiny_models.NUM_LAYERS)
    return families.build(FAMILIES[name], FAMILIES[name].build(folder), 3).offline


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() & {"step3p7"}))
def test_answers_of_layers_with_different_query_heads_are_the_references(name: str, tmp_path: pathlib.Path) -> None:
    """Experts read on the host which tokens they have, so this model has none."""
    step3p7.build_with(tmp_path, 0, {"mlp_layer_types": ["dense"] * step3p7.NUM_LAYERS})
    check(families.build(FAMILIES[name], tmp_path, 3).offline, set())


def check(
    family: offline.OfflineModel,
    expected_waiting: set[str],
    kernel_modules: Sequence[types.ModuleType] = (),
    *,
    num_questions: int = 3,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_tokens: int = offline.MAX_NEW_TOKENS,
) -> None:
    """Asserts that answers are the references', and that steps wait for these operators alone.

    Attention is that of `kernel_modules`, or operators of PyTorch.
    """
    num_threads = torch.get_num_threads()
    questions = family.questions[:num_questions]
    spans = [span.length for question in questions for span in question.prompt.mutual_spans]
    with installed(*kernel_modules) as cuda:
        config = replace(family.runner.config, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        runner = GPUModelRunner(config, family.runner.family)
        session = offline.Session(
            replace(family, runner=runner), num_blocks=NUM_BLOCKS, max_num_batched_tokens=max([23, *spans])
        )
        runner.capture_model()
        assert runner.graphs is not None
        assert runner.backend.name == "triton"
        with cuda.device.noting() as events:
            answers = session.ask([question.prompt for question in questions], max_tokens=max_tokens)
    torch.set_num_threads(num_threads)
    assert answers.token_ids == [question.expected[:max_tokens] for question in questions]
    waiting = {event.operator for event in events if event.kind not in (PINNED, RESULT, RETURN)}
    assert waiting == expected_waiting
