"""Greedy answers equal Hugging Face `generate` token for token, with any batch, chunks and preemptions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests import tiny_models
from tests.parity import offline

NUM_PROMPTS = 21


@pytest.fixture(scope="module", params=sorted(tiny_models.BUILDERS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> offline.OfflineModel:
    folder = tmp_path_factory.mktemp("models") / request.param
    tiny_models.BUILDERS[request.param](folder)
    return offline.build(folder, NUM_PROMPTS, (0, 1, 3))


@pytest.fixture
def expected(model: offline.OfflineModel) -> list[list[int]]:
    return [question.expected for question in model.questions]


def test_answers_depend_on_the_prompt(expected: list[list[int]]) -> None:
    assert len({tuple(answer) for answer in expected}) > NUM_PROMPTS // 2


def test_mixed_batch_equals_generate(model: offline.OfflineModel, expected: list[list[int]]) -> None:
    answers, _, _ = offline.run(model, max_num_batched_tokens=2048)
    assert answers == expected


def test_tiny_chunks_cut_images_and_change_nothing(model: offline.OfflineModel, expected: list[list[int]]) -> None:
    answers, _, steps = offline.run(model, max_num_batched_tokens=7)
    assert answers == expected
    spans = {f"r{i}": [item.span for item in q.prompt.images] for i, q in enumerate(model.questions)}
    cuts = [
        chunk
        for step in steps
        for chunk in step.chunks
        for span in spans[chunk.request_id]
        if span.offset < chunk.start + chunk.num_tokens < span.stop
    ]
    assert len(cuts) > NUM_PROMPTS, "chunks end inside images"


def test_preemption_changes_nothing(model: offline.OfflineModel, expected: list[list[int]]) -> None:
    answers, scheduler, steps = offline.run(model, max_num_batched_tokens=64, num_blocks=24)
    assert answers == expected
    assert sum(len(step.admitted) for step in steps) > NUM_PROMPTS, "somebody was preempted and came back"
    assert scheduler.kv_cache.usage == 0


def test_late_rows_and_a_small_row_budget_change_nothing(
    model: offline.OfflineModel, expected: list[list[int]]
) -> None:
    cache_rows = max(item.num_rows for question in model.questions for item in question.prompt.images)
    answers, _, steps = offline.run(model, max_num_batched_tokens=64, cache_rows=cache_rows, rows_arrive_after=3)
    assert answers == expected
    assert any(step.evicted_rows for step in steps), "rows were evicted and fetched again"


def test_swapped_rows_change_the_answers(model: offline.OfflineModel, expected: list[list[int]]) -> None:
    """Answers depend on the images; otherwise the parity above would not reveal a wrong image."""
    keys = sorted(model.rows, key=lambda key: (len(model.rows[key]), key.value))
    swapped = dict(model.rows)
    for first, second in zip(keys[::2], keys[1::2], strict=False):
        if len(model.rows[first]) == len(model.rows[second]):
            swapped[first], swapped[second] = model.rows[second], model.rows[first]
    wrong = replace(model, rows=swapped)
    answers, _, _ = offline.run(wrong, max_num_batched_tokens=2048)
    changed = [i for i, answer in enumerate(answers) if answer != expected[i]]
    assert len(changed) > NUM_PROMPTS // 4
    assert all(model.questions[i].prompt.images for i in changed)
