"""The CUDA runner on a fake CUDA: its calls, its memory arithmetic, and correct answers from its graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.runner.cuda.graph_recorder import GraphRecorder
from decoder_svc.runner.cuda.runner import GPUModelRunner
from decoder_svc.runner.graphs.step_graphs import GraphSizes
from decoder_svc.runner.worst_case import WorstCase
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import SampledToken, SchedulerOutput
from lookonce.embedding_meta import RowDtype
from tests import tiny_models
from tests.decoder_svc.runner.cuda.fake_cuda import (
    ALLOCATED_BYTES,
    FREE_BYTES,
    GRAPH_BYTES,
    NODES_BYTES,
    NUM_PROCESSORS,
    PEAK_BYTES,
    FakeCuda,
    FakeStream,
    FakeTriton,
    installed,
)
from tests.decoder_svc.runner.cuda.simulated_device import PINNED, RESULT, RETURN, Event
from tests.parity import offline

# All questions at once, and some to spare: the fake's attention reads the whole pool for each token of a graph.
NUM_BLOCKS = 40
WORST = WorstCase(64, 4, 300, 2, 16, tiny_models.HIDDEN_SIZE, RowDtype.FLOAT32)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> offline.OfflineModel:
    folder = tiny_models.build_llava_clip(tmp_path_factory.mktemp("models") / "llava")
    return offline.build(folder, num_prompts=3, images_per_prompt=(0, 1, 2))


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with installed() as cuda:
        yield cuda


@pytest.fixture
def pools(cuda: FakeCuda) -> list[object]:
    return cuda.pools


@pytest.fixture
def model(reference: offline.OfflineModel, cuda: FakeCuda) -> Iterator[offline.OfflineModel]:
    num_threads = torch.get_num_threads()
    runner = reference.runner
    made = GPUModelRunner(replace(runner.config, max_num_seqs=5, max_num_batched_tokens=64), runner.family)
    yield replace(reference, runner=made)
    torch.set_num_threads(num_threads)


def test_answers_with_graphs_are_the_references(model: offline.OfflineModel) -> None:
    session = offline.Session(model, num_blocks=NUM_BLOCKS, max_num_batched_tokens=23)
    model.runner.capture_model()
    graphs = model.runner.graphs
    assert graphs is not None
    assert graphs.sizes == GraphSizes((1, 2, 4, 8), (16, 32, 64))
    answers = session.ask([question.prompt for question in model.questions])
    assert answers.token_ids == [question.expected for question in model.questions]
    is_decode = [all(chunk.num_tokens == 1 for chunk in step.chunks) for step in session.steps]
    assert any(is_decode)


def test_chunks_with_images_are_replayed_and_give_the_bits_of_the_same_passes_at_once(
    model: offline.OfflineModel, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers() -> tuple[offline.Answers, int]:
        session = offline.Session(model, num_blocks=NUM_BLOCKS, max_num_batched_tokens=23)
        model.runner.capture_model()
        monkeypatch.setattr(model.runner, "_forward", lambda *_, **__: pytest.fail("a step without a graph"))
        return session.ask([question.prompt for question in model.questions[:4]], logprobs=5), len(cuda.pools)

    recorded, num_recorded = answers()
    assert num_recorded == 7
    assert recorded.token_ids == [question.expected for question in model.questions[:4]]
    monkeypatch.setattr(GraphRecorder, "record", lambda _self, function: function)
    at_once, num_recorded = answers()
    assert num_recorded == 7, "nothing is recorded any more"
    assert at_once.logprobs == recorded.logprobs


def test_graphs_share_one_pool_of_memory(model: offline.OfflineModel, pools: list[object]) -> None:
    model.runner.initialize_kv_cache(20)
    model.runner.capture_model()
    assert len(pools) == 7
    assert len(set(map(id, pools))) == 1


def test_without_graphs_nothing_is_recorded(model: offline.OfflineModel, pools: list[object]) -> None:
    model.runner.config = replace(model.runner.config, use_graphs=False)
    model.runner.initialize_kv_cache(20)
    model.runner.capture_model()
    assert pools == []
    assert model.runner.profile_run(WORST) == FREE_BYTES - (PEAK_BYTES - ALLOCATED_BYTES)


def test_free_memory_excludes_the_heaviest_step_and_all_graphs(
    model: offline.OfflineModel, pools: list[object]
) -> None:
    free = model.runner.profile_run(WORST)
    assert free == FREE_BYTES - (PEAK_BYTES - ALLOCATED_BYTES) - GRAPH_BYTES - 7 * NODES_BYTES
    assert len(pools) == 4, "the two largest of each kind"
    assert (model.runner.tokenwise_graph_batch_sizes, model.runner.chunk_graph_sizes) == ((1, 2, 4, 8), (16, 32, 64))
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
    session = offline.Session(model, num_blocks=NUM_BLOCKS)
    monkeypatch.setattr(model.runner.transfer, "wait_for_overlapping", lambda: settled.append(len(session.steps)))
    with_images = next(question for question in model.questions if question.prompt.images)
    text_only = next(question for question in model.questions if not question.prompt.images)
    assert session.ask([text_only.prompt]).token_ids == [text_only.expected]
    assert settled == []
    assert session.ask([with_images.prompt]).token_ids == [with_images.expected]
    assert settled


def test_memory_of_rows_is_not_reused_before_steps_have_read_them(model: offline.OfflineModel) -> None:
    """Rows are allocated on their own stream, so the allocator must learn that the steps' stream uses them."""
    session = offline.Session(model, num_blocks=NUM_BLOCKS)
    with_images = next(question for question in model.questions if question.prompt.images)
    assert session.ask([with_images.prompt]).token_ids == [with_images.expected]
    kept = [values for parts in model.runner.row_cache._parts.values() for values in parts.values()]
    assert kept
    assert {values.data_ptr() for values in kept} <= FakeStream.steps.recorded


SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, frequency_penalty=0.2, seed=3, max_tokens=6, logprobs=2)


def events_of_steps(
    model: offline.OfflineModel, cuda: FakeCuda, params: SamplingParams | None
) -> list[tuple[SchedulerOutput, list[Event]]]:
    """Answers all questions; returns each step with its copies and the operators that the host waited for."""
    session = offline.Session(model, num_blocks=NUM_BLOCKS, max_num_batched_tokens=23)
    model.runner.capture_model()
    execute, found = model.runner.execute_model, []

    def noted(step: SchedulerOutput) -> list[SampledToken]:
        with cuda.device.noting() as events:
            tokens = execute(step)
        found.append((step, events))
        return tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.runner, "execute_model", noted)
        session.ask([question.prompt for question in model.questions], params=params)
    return found


@pytest.mark.parametrize("params", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("use_graphs", [True, False])
def test_a_step_waits_for_the_device_only_for_its_tokens(
    model: offline.OfflineModel, cuda: FakeCuda, params: SamplingParams | None, use_graphs: bool
) -> None:
    """Prompts with images included: no copy from pageable memory, no index on the host, no value read early."""
    model.runner.config = replace(model.runner.config, use_graphs=use_graphs)
    steps = events_of_steps(model, cuda, params)
    assert (model.runner.graphs is not None) == use_graphs
    assert any(item.num_rows for step, _ in steps for request in step.admitted for item in request.images)
    num_steady = 0 if params is None else 4
    before: list[RequestId] = []
    for step, events in steps:
        kinds = [event.kind for event in events]
        assert [event for event in events if event.kind not in (PINNED, RESULT, RETURN)] == []
        is_sampled = any(chunk.samples for chunk in step.chunks)
        assert kinds.count(RESULT) == (0 if not is_sampled else 1 if params is None else 2)
        names = [chunk.request_id for chunk in step.chunks]
        is_decode = {chunk.num_tokens for chunk in step.chunks} == {1}
        if is_decode and names == before and params is None:
            assert kinds.count(PINNED) == 1, "all numbers of a step in one copy"
            num_steady += 1
        before = names if is_decode else []
    assert num_steady > 3


@pytest.mark.parametrize("params", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("use_graphs", [True, False])
def test_tokens_of_nan_are_noted(
    model: offline.OfflineModel, params: SamplingParams | None, use_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head spoils one step of each answer. The ids that the device keeps are of the vocabulary all the same."""
    model.runner.config = replace(model.runner.config, use_graphs=use_graphs)
    session = offline.Session(model, num_blocks=NUM_BLOCKS)
    model.runner.capture_model()
    assert (model.runner.graphs is not None) == use_graphs
    execute, table = model.runner.execute_model, model.runner.get_model().get_input_embeddings().weight
    whole, found, spoilt_step = table.clone(), [], 3

    def noted(step: SchedulerOutput) -> list[SampledToken]:
        with torch.inference_mode():
            table.fill_(torch.nan) if len(session.steps) == spoilt_step else table.copy_(whole)
        tokens = execute(step)
        found.append([token.is_nan for token in tokens])
        assert all(0 <= token.token_id < len(table) for token in tokens)
        return tokens

    monkeypatch.setattr(model.runner, "execute_model", noted)
    try:
        session.ask([model.questions[0].prompt], params=params)
    finally:
        with torch.inference_mode():
            table.copy_(whole)
    # The later tokens see the keys of the spoilt step.
    assert found[: spoilt_step + 2] == [[False], [False], [True], [True], [True]]


def test_rows_are_copied_without_waiting(model: offline.OfflineModel, cuda: FakeCuda) -> None:
    put = model.runner.put_rows
    kinds: set[str] = set()

    def noted(fetched: FetchedRows) -> None:
        with cuda.device.noting() as events:
            put(fetched)
        kinds.update(event.kind for event in events)

    session = offline.Session(model, num_blocks=NUM_BLOCKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.runner, "put_rows", noted)
        session.ask([question.prompt for question in model.questions])
    assert kinds == {PINNED}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda logits: logits * torch.ones(1, 1, 1).to(logits.device, non_blocking=True),
        lambda logits: logits * (logits.sum().item() < 1e9),
        lambda logits: logits[logits > -1e9].view(logits.shape),
        lambda logits: logits[:, list(range(logits.shape[1]))],
        lambda logits: logits.cpu().pin_memory().to(logits.device, non_blocking=True),
        lambda logits: logits[:, logits.sum((0, 2)).nonzero()[:, 0]],
    ],
    ids=["pageable copy", "item", "boolean index", "list index", "copy to the host", "nonzero"],
)
def test_a_model_that_waits_for_the_device_is_found_in_steps_and_not_recorded(
    model: offline.OfflineModel,
    cuda: FakeCuda,
    wrong: Callable[[torch.Tensor], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = model.runner.get_model().lm_head
    right = head.forward
    monkeypatch.setattr(head, "forward", lambda hidden: wrong(right(hidden)))
    steps = events_of_steps(model, cuda, None)
    assert model.runner.graphs is None
    assert cuda.pools == [], "found before a recording began"
    sampling = [events for step, events in steps if any(chunk.samples for chunk in step.chunks)]
    assert sampling
    for events in sampling:
        kinds = [event.kind for event in events]
        assert {*kinds} - {PINNED, RESULT, RETURN} or kinds.count(RESULT) > 1


def test_after_a_failed_recording_nothing_uses_its_pool(
    model: offline.OfflineModel, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from page-locked memory makes nobody wait, so only the recording refuses it."""
    head = model.runner.get_model().lm_head
    right, one = head.forward, torch.ones(1).pin_memory()
    monkeypatch.setattr(head, "forward", lambda hidden: right(hidden) * one.to(hidden.device, non_blocking=True))
    free = model.runner.profile_run(WORST)
    assert free == FREE_BYTES - (PEAK_BYTES - ALLOCATED_BYTES), "no memory is kept for graphs"
    assert len(cuda.pools) == 1
    assert FakeStream.current is FakeStream.steps
    session = offline.Session(model, num_blocks=NUM_BLOCKS)
    model.runner.capture_model()
    assert model.runner.graphs is None
    assert len(cuda.pools) == 1, "no further recording begins"
    question = model.questions[0]
    assert session.ask([question.prompt]).token_ids == [question.expected]
    torch.cuda.empty_cache()
