"""The CUDA runner of a model that is split over two ranks, each a process with a simulated device of its own."""

from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoder_svc.rank_start import rank_config
from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.cuda.quantized_layers import DeviceLinear
from decoder_svc.runner.cuda.runner import GPUModelRunner
from decoder_svc.runner.parallel import rank_processes
from decoder_svc.runner.parallel.leader import Leader
from decoder_svc.runner.parallel.other_ranks import OtherRanks
from decoder_svc.runner.parallel.rank_processes import RankProcesses
from decoder_svc.runner.worst_case import WorstCase
from decoder_svc.scheduling.request import CacheScope, Request
from lookonce.embedding_meta import RowDtype
from lookonce.model.adapter_folder import AdapterFolder
from tests import tiny_models
from tests.decoder_svc.engine.driven_engine import DrivenEngine, random_workload
from tests.decoder_svc.rounded_weights import round_weights
from tests.decoder_svc.runner.cuda import simulated_rank
from tests.decoder_svc.runner.cuda.fake_cuda import ALLOCATED_BYTES, FREE_BYTES, PEAK_BYTES, FakeCuda, installed
from tests.decoder_svc.runner.cuda.gloo_as_nccl import nccl_installed
from tests.decoder_svc.runner.cuda.interpreted_triton import (
    triton_attention,
    triton_layers,
    triton_penalties,
    triton_quantized,
    triton_recurrent,
    triton_rowwise,
    triton_writes,
)
from tests.decoder_svc.runner.cuda.simulated_device import PINNED, RESULT, RETURN
from tests.lora_folders import lora_folder
from tests.parity import families, offline
from tests.quantized_folders import FORMS, store_quantized
from tests.tiny_families import FAMILIES

# All questions at once, and some to spare: the fake's attention reads the whole pool for each token of a step.
NUM_BLOCKS = 40
QUANTIZED = (triton_attention, triton_layers, triton_penalties, triton_quantized, triton_rowwise, triton_writes)
WORST = WorstCase(64, 4, 300, 2, 16, tiny_models.HIDDEN_SIZE, RowDtype.FLOAT32)


def must_not_be_lost() -> None:
    raise AssertionError("a rank has ended")


@contextlib.contextmanager
def split(
    family: offline.OfflineModel, *kernel_modules: types.ModuleType, **changes: Any
) -> Iterator[tuple[offline.OfflineModel, FakeCuda]]:
    """Yields the model split over the device of this process and that of another one."""
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **changes}
    config = replace(family.runner.config, **settings)
    environment = {simulated_rank.KERNELS: ",".join(module.__name__ for module in kernel_modules)}
    num_threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(rank_processes, "_MODULE", simulated_rank.__name__)
        processes = RankProcesses([environment], [str(config.folder), "1", "json", "info"])
    others = OtherRanks(processes.connections, on_loss=must_not_be_lost)
    try:
        with nccl_installed(), installed(*kernel_modules) as cuda:
            ranks = others.meet(rank_config(config, "cuda", "float32"), GPUModelRunner.rank_engine)
            runner = GPUModelRunner(replace(config, ranks=ranks), family.runner.family)
            others.wait_until_loaded()
            runner.lead(Leader(ranks, others.connections))
            yield replace(family, runner=runner), cuda
    finally:
        others.close()
        processes.close()
        torch.set_num_threads(num_threads)


# A plain model; three position axes and feature levels; a window, tokens of an image that see each other, and scaled
# embeddings; recurrent layers beside attention.
@pytest.mark.parametrize("name", ["llava_clip", "qwen3_vl", "gemma3", "qwen3_5"])
def test_two_ranks_give_the_references_answers(name: str, tiny_family: Callable[[str], families.Conformance]) -> None:
    family = tiny_family(name).offline
    questions = family.questions
    prompts, expected = [each.prompt for each in questions], [each.expected for each in questions]
    longest = max([23, *(span.length for prompt in prompts for span in prompt.mutual_spans)])
    with split(family, max_num_seqs=offline.NUM_SEQS) as (model, cuda):
        whole = family.runner.get_kv_cache_spec()
        assert model.runner.get_kv_cache_spec().num_kv_heads * 2 == whole.num_kv_heads
        # Recurrent layers are whole on each rank.
        assert model.runner.weight_bytes < 0.8 * family.runner.weight_bytes
        session = offline.Session(model, num_blocks=NUM_BLOCKS, max_num_batched_tokens=longest)
        with cuda.device.noting() as events:
            assert session.ask(prompts).token_ids == expected
        assert session.ask(prompts).token_ids == expected, "with hits in the prefix cache"
        check_other_images(model, longest)
    if name == "llava_clip":
        assert {event.kind for event in events} == {PINNED, RESULT, RETURN}, "no step waits for the device early"


def check_other_images(model: offline.OfflineModel, longest: int) -> None:
    """Asserts that an image with other rows has another answer."""
    asked = next(each for each in model.questions if each.prompt.images)
    others = replace(model, rows={key: rows.flip(0) * 2 for key, rows in model.rows.items()})
    session = offline.Session(others, num_blocks=NUM_BLOCKS, max_num_batched_tokens=longest)
    assert session.ask([asked.prompt]).token_ids != [asked.expected]


def short(family: offline.OfflineModel) -> offline.Question:
    """Returns the shortest question with an image: a step takes up to a second in Triton's interpreter."""
    asked = [each for each in family.questions if each.prompt.images]
    return min(asked, key=lambda each: len(each.prompt.token_ids))


def check_short_answer(model: offline.OfflineModel, question: offline.Question) -> None:
    session = offline.Session(model, num_blocks=60, max_num_batched_tokens=32, max_num_seqs=2)
    assert session.ask([question.prompt], max_tokens=3).token_ids == [question.expected[:3]]


@pytest.mark.parametrize(
    ("name", "modules"), [("llava_clip", ()), ("qwen3_5", (triton_recurrent,))], ids=["attention", "recurrent layers"]
)
def test_our_kernels_compute_a_ranks_heads(
    name: str, modules: Sequence[types.ModuleType], tiny_family: Callable[[str], families.Conformance]
) -> None:
    family = tiny_family(name).offline
    kernels = (triton_attention, triton_penalties, triton_writes, *modules)
    with split(family, *kernels, max_num_seqs=2, max_num_batched_tokens=32) as (model, cuda):
        assert model.runner.backend.name == "triton"
        assert model.runner.recurrent is None or model.runner.recurrent.have_kernels
        check_short_answer(model, short(family))
        assert cuda.device.num_launches > 0


@pytest.mark.parametrize(("name", "form"), [("llava_clip", "awq"), ("qwen2_5_vl", "fp8-block")])
def test_codes_of_a_folder_are_split(name: str, form: str, tmp_path: pathlib.Path) -> None:
    stored, whole = (FAMILIES[name].build(tmp_path / each) for each in ("stored", "whole"))
    num_layers = len(store_quantized(stored, FORMS[form], whole))
    family = families.build(FAMILIES[name], whole, 3).offline
    with split(family, *QUANTIZED, folder=stored, max_num_seqs=2, max_num_batched_tokens=32) as (model, _):
        assert num_layers_with_codes(model) == num_layers
        check_short_answer(model, short(family))


def test_weights_that_are_rounded_while_loading_are_split(tmp_path: pathlib.Path) -> None:
    whole, rounded = (FAMILIES["qwen2_5_vl"].build(tmp_path / each) for each in ("whole", "rounded"))
    round_weights(rounded, 4)
    family = families.build(FAMILIES["qwen2_5_vl"], rounded, 3).offline
    changes = {"folder": whole, "quantize_bits": 4, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    with split(family, *QUANTIZED, **changes) as (model, _):
        assert isinstance(model.runner.get_model().lm_head.part, DeviceLinear)
        check_short_answer(model, short(family))


def num_layers_with_codes(model: offline.OfflineModel) -> int:
    return sum(isinstance(module, DeviceLinear) for module in model.runner.get_model().modules())


def test_adapters_are_split(tmp_path: pathlib.Path) -> None:
    folder = tiny_models.build_llava_clip(tmp_path / "model")
    base = families.build(FAMILIES["llava_clip"], folder, 3).offline
    adapter = AdapterFolder.open("one", lora_folder(tmp_path / "adapter", folder))
    config = replace(base.runner.config, adapters=(adapter,))
    whole = replace(base, runner=CPUModelRunner(config, base.runner.family))
    expected = {name: answers_of(whole, name) for name in (None, adapter.fingerprint)}
    assert expected[None] != expected[adapter.fingerprint]
    with split(whole) as (model, _):
        for name in (adapter.fingerprint, None):
            assert answers_of(model, name) == expected[name]
        model.runner.drop_adapter(adapter.fingerprint)
        assert answers_of(model, None) == expected[None]


def answers_of(model: offline.OfflineModel, adapter: str | None) -> list[list[int]]:
    """Returns the answers to all questions with an adapter, or with none."""
    session = offline.Session(model, num_blocks=NUM_BLOCKS, max_num_seqs=4)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(offline, "Request", functools.partial(Request, cache_scope=CacheScope(adapter=adapter)))
        return session.ask([each.prompt for each in model.questions]).token_ids


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> offline.OfflineModel:
    folder = tiny_models.build_llava_clip(tmp_path_factory.mktemp("models") / "llava")
    return offline.build(folder, num_prompts=5, images_per_prompt=(0, 1, 2))


def test_steps_that_overlap_give_the_answers_of_those_that_do_not(demo: offline.OfflineModel) -> None:
    """The ids that rank 0 samples reach the other rank from its device."""
    workload = random_workload(demo, 3).quiet
    expected = DrivenEngine(demo, overlaps=False, num_blocks=100).serve(workload)
    with split(demo, max_num_seqs=6, max_num_batched_tokens=40) as (model, _):
        assert model.runner.overlaps_steps
        engine = DrivenEngine(model, overlaps=True, num_blocks=100)
        found = engine.serve(workload)
    assert engine.num_ahead > 0
    assert {name: one.token_ids for name, one in found.items()} == {
        name: one.token_ids for name, one in expected.items()
    }


def test_no_graph_is_recorded(demo: offline.OfflineModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), split(demo) as (model, cuda):
        assert model.runner.profile_run(WORST) == FREE_BYTES - (PEAK_BYTES - ALLOCATED_BYTES)
        model.runner.initialize_kv_cache(NUM_BLOCKS)
        model.runner.capture_model()
        assert model.runner.graphs is None
        assert cuda.pools == []
    assert "rank 0 of 2 has its part of the language model, without graphs" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
