"""The CUDA runner on a fake CUDA: its calls, its memory arithmetic, and correct answers from its graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from decoder_svc.runner.worst_case import WorstCase
from lookonce.embedding_meta import RowDtype
from tests import tiny_models
from tests.decoder_svc.runner.cuda.fake_cuda import (
    ALLOCATED_BYTES,
    FREE_BYTES,
    GRAPH_BYTES,
    NUM_PROCESSORS,
    PEAK_BYTES,
    FakeGPURunner,
    FakeStream,
    FakeTriton,
    install,
)
from tests.parity import offline

WORST = WorstCase(64, 4, 300, 2, 16, tiny_models.HIDDEN_SIZE, RowDtype.FLOAT32)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> offline.OfflineModel:
    folder = tiny_models.build_llava_clip(tmp_path_factory.mktemp("models") / "llava")
    return offline.build(folder, num_prompts=5, images_per_prompt=(0, 1, 2))


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    return install(monkeypatch)


@pytest.fixture
def model(reference: offline.OfflineModel, pools: list[object]) -> Iterator[offline.OfflineModel]:
    num_threads = torch.get_num_threads()
    runner = reference.runner
    made = FakeGPURunner(replace(runner.config, max_num_seqs=5), runner.family)
    yield replace(reference, runner=made)
    torch.set_num_threads(num_threads)


def test_answers_with_graphs_are_the_references(model: offline.OfflineModel) -> None:
    session = offline.Session(model, max_num_batched_tokens=23)
    model.runner.capture_model()
    graphs = model.runner.graphs
    assert graphs is not None
    assert graphs.sizes == (1, 2, 4, 8)
    answers = session.ask([question.prompt for question in model.questions])
    assert answers.token_ids == [question.expected for question in model.questions]
    is_decode = [all(chunk.num_tokens == 1 for chunk in step.chunks) for step in session.steps]
    assert any(is_decode)


def test_graphs_share_one_pool_of_memory(model: offline.OfflineModel, pools: list[object]) -> None:
    model.runner.initialize_kv_cache(20)
    model.runner.capture_model()
    assert len(pools) == 4
    assert len(set(map(id, pools))) == 1


def test_without_graphs_nothing_is_recorded(model: offline.OfflineModel, pools: list[object]) -> None:
    model.runner.config = replace(model.runner.config, use_graphs=False)
    model.runner.initialize_kv_cache(20)
    model.runner.capture_model()
    assert pools == []
    assert model.runner.profile_run(WORST) == FREE_BYTES - (PEAK_BYTES - ALLOCATED_BYTES)


def test_free_memory_excludes_the_heaviest_step_and_the_largest_graph(
    model: offline.OfflineModel, pools: list[object]
) -> None:
    free = model.runner.profile_run(WORST)
    assert free == FREE_BYTES - (PEAK_BYTES - ALLOCATED_BYTES) - GRAPH_BYTES
    assert len(pools) == 1, "the largest alone"
    assert model.runner.tokenwise_graph_batch_sizes == (1, 2, 4, 8)
    assert model.runner.graphs is None
    assert len(model.runner.batch) == 0
    assert len(model.runner.row_cache) == 0


def test_the_kernel_gets_the_devices_number_of_multiprocessors(model: offline.OfflineModel) -> None:
    assert isinstance(model.runner.backend, FakeTriton)
    assert model.runner.backend.num_processors == NUM_PROCESSORS


def test_steps_wait_for_rows_before_they_read_them(
    model: offline.OfflineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a step that reads rows waits: the copy of rows for a later step runs concurrently."""
    settled: list[int] = []
    session = offline.Session(model)
    monkeypatch.setattr(model.runner.transfer, "wait_for_overlapping", lambda: settled.append(len(session.steps)))
    with_images = next(question for question in model.questions if question.prompt.images)
    text_only = next(question for question in model.questions if not question.prompt.images)
    assert session.ask([text_only.prompt]).token_ids == [text_only.expected]
    assert settled == []
    assert session.ask([with_images.prompt]).token_ids == [with_images.expected]
    assert settled


def test_memory_of_rows_is_not_reused_before_steps_have_read_them(model: offline.OfflineModel) -> None:
    """Rows are allocated on their own stream, so the allocator must learn that the steps' stream uses them."""
    session = offline.Session(model)
    with_images = next(question for question in model.questions if question.prompt.images)
    assert session.ask([with_images.prompt]).token_ids == [with_images.expected]
    kept = [values for parts in model.runner.row_cache._parts.values() for values in parts.values()]
    assert kept
    assert {values.data_ptr() for values in kept} <= FakeStream.steps.recorded
