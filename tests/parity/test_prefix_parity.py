"""Greedy answers equal Hugging Face `generate` with any cache contents; in deterministic mode also bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from decoder_svc.scheduling.prompt import Prompt, Span
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.embedding_store import EmbeddingStore
from tests import tiny_models
from tests.parity import offline

NUM_PROMPTS = 36
BLOCK_SIZE = 8


@pytest.fixture(scope="module", params=sorted(tiny_models.BUILDERS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> offline.OfflineModel:
    folder = tmp_path_factory.mktemp("models") / request.param
    tiny_models.BUILDERS[request.param](folder)
    return offline.build(folder, NUM_PROMPTS, (0, 1, 3), BLOCK_SIZE)


@pytest.fixture
def redis_server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def prompts(model: offline.OfflineModel) -> list[Prompt]:
    return [question.prompt for question in model.questions]


@pytest.fixture
def expected(model: offline.OfflineModel) -> list[list[int]]:
    return [question.expected for question in model.questions]


def cut(prompt: Prompt, num_tokens: int) -> Prompt:
    """Returns the first tokens of a prompt; an image that reaches over the cut is shortened."""
    images = tuple(
        replace(item, span=Span(item.span.offset, min(item.span.stop, num_tokens) - item.span.offset))
        for item in prompt.images
        if item.span.offset < num_tokens
    )
    positions = prompt.positions
    if positions is not None:
        axes = tuple(axis[:num_tokens] for axis in positions.axes)
        positions = replace(positions, axes=axes, delta=max(axis[-1] for axis in axes) + 1 - num_tokens)
    return Prompt(prompt.token_ids[:num_tokens], images, positions)


def test_whole_prompts_hit_the_cache_the_second_time(
    model: offline.OfflineModel, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    session = offline.Session(model, num_blocks=20_000, cache_rows=2000)
    assert session.ask(prompts).token_ids == expected
    again = session.ask(prompts)
    assert again.token_ids == expected
    for request in again.requests:
        cached = request.usage.cached_prompt_tokens
        assert cached in (request.num_prompt_tokens - 1, request.num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE)


def test_hits_and_chunks_may_end_inside_images(
    model: offline.OfflineModel, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    session = offline.Session(model, num_blocks=20_000, cache_rows=2000, max_num_batched_tokens=23)
    beginnings = [
        cut(prompt, item.span.offset + item.span.length // 2 + 1) for prompt in prompts for item in prompt.images[-1:]
    ]
    session.ask(beginnings, max_tokens=1)
    answers = session.ask(prompts)
    assert answers.token_ids == expected
    inside = [
        request
        for request in answers.requests
        for item in request.prompt.images
        if item.span.offset < request.usage.cached_prompt_tokens < item.span.stop
    ]
    assert len(inside) > NUM_PROMPTS // 4, "hits end inside images"


def test_rows_on_the_device_serve_when_the_prefix_cache_is_empty(
    model: offline.OfflineModel, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    session = offline.Session(model, cache_rows=20_000)
    session.ask(prompts, max_tokens=1)
    session.scheduler.kv_cache.reset_prefix_cache()
    num_steps = len(session.steps)
    assert session.ask(prompts).token_ids == expected
    assert not any(step.fetches for step in session.steps[num_steps:])


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 23])
def test_rows_from_redis_in_any_range_serve_a_decoder_with_empty_caches(
    model: offline.OfflineModel,
    prompts: list[Prompt],
    expected: list[list[int]],
    max_num_batched_tokens: int,
    redis_server: EmbeddedRedis,
) -> None:
    """With little room on the device, rows are evicted in parts and fetched again in arbitrary ranges."""
    store = EmbeddingStore(redis_server.url, budget_s=5.0, ttl_s=600, max_entry_bytes=1 << 20)
    offline.fill_store(store, model)
    session = offline.Session(
        model, num_blocks=40, cache_rows=72, max_num_batched_tokens=max_num_batched_tokens, store=store
    )
    answers = session.ask(prompts)
    assert answers.token_ids == expected
    ranges = [fetch.rows for step in session.steps for fetch in step.fetches]
    assert max_num_batched_tokens > 23 or any(rows.start > 0 for rows in ranges), "whole images only"
    assert sum(request.usage.cached_image_tokens for request in answers.requests) > 0
    assert store.stats.snapshot() == {("write", "ok"): len(model.rows), ("read_rows", "ok"): len(ranges)}
    store.close()


def test_eight_blocks_and_twenty_clients(
    model: offline.OfflineModel, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    """The pool holds little more than the longest request, so every request is preempted and computed again."""
    longest = max(len(prompt.token_ids) for prompt in prompts) + offline.MAX_NEW_TOKENS
    model = model.with_block_size(-(-longest // 8))
    session = offline.Session(model, num_blocks=8, max_num_seqs=20, max_num_batched_tokens=64)
    answers = session.ask(prompts)
    assert answers.token_ids == expected
    assert sum(request.num_preemptions > 0 for request in answers.requests) > 3
    assert session.scheduler.kv_cache.pool.num_free_blocks == 8


def test_deterministic_mode_gives_the_same_bits_cold_and_warm(
    model: offline.OfflineModel, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    some = prompts[:12]
    alone = []
    for prompt in some[:4]:
        cold = offline.Session(model, deterministic=True, cache_rows=2000)
        alone += cold.ask([prompt], logprobs=5).logprobs
    session = offline.Session(model, num_blocks=20_000, cache_rows=2000, deterministic=True)
    first = session.ask(some, logprobs=5)
    again = session.ask(some, logprobs=5)
    assert first.token_ids == again.token_ids == expected[:12]
    assert first.logprobs == again.logprobs, "cold and hit differ in a bit"
    assert first.logprobs[:4] == alone, "the batch shows in the bits"
    hits = [request.usage.cached_prompt_tokens for request in again.requests]
    assert all(
        hit > 0 or request.num_prompt_tokens <= BLOCK_SIZE for hit, request in zip(hits, again.requests, strict=True)
    )
