"""Every family gives the tokens of Hugging Face `generate`, with any caching, chunking and preemption."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import PIL.Image
import pytest
import torch
import torch.nn.functional as F

from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.scheduling.prompt import Prompt
from encoder_svc.images.pixel_modes import rgb_pixels
from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Mask
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.model.half_model import load_vision_half
from lookonce.store.embedding_store import EmbeddingStore
from tests import tiny_models
from tests.parity import families, offline
from tests.tiny_families import FAMILIES

# Token budget of a step that cuts prompts wherever cutting is allowed.
SMALL_STEP = 23
# Families with layers that have a window, beside layers without one.
WINDOWED = FAMILIES.keys() & {
    "aya_vision", "cohere2_vision", "cohere_compass", "exaone4_5", "gemma3", "gemma3n", "gemma4", "gemma4_moe",
    "gemma4_unified", "lfm3_vl", "llama4", "muse_glimmer", "muse_spark", "paligemma2", "step3p7",
}  # fmt: skip
# Families with recurrent layers, which test_recurrent_states.py looks at.
RECURRENT = FAMILIES.keys() & {
    "lfm2_vl", "lfm3_vl", "minicpmv4_6", "minicpmv4_7", "nemotron_h_omni", "qwen3_5", "qwen3_5_moe",
}  # fmt: skip
# Their own processors take images of three channels alone.
NO_TRANSPARENCY = ("lfm2_vl",)


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tiny_family: Callable[[str], families.Conformance]) -> families.Conformance:
    return tiny_family(request.param)


@pytest.fixture
def prompts(family: families.Conformance) -> list[Prompt]:
    return [question.prompt for question in family.offline.questions]


@pytest.fixture
def expected(family: families.Conformance) -> list[list[int]]:
    return [question.expected for question in family.offline.questions]


@pytest.fixture(scope="module")
def redis_server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


def smallest_step(family: families.Conformance, prompts: list[Prompt]) -> int:
    """Returns the smallest token budget with which the prompts can be served in cut steps."""
    return max([SMALL_STEP, *(span.length for prompt in prompts for span in prompt.mutual_spans)])


def test_prompts_are_those_of_the_familys_own_processor(family: families.Conformance, prompts: list[Prompt]) -> None:
    assert [list(prompt.token_ids) for prompt in prompts] == family.reference_ids


def test_prompts_of_token_ids_are_taken_with_and_without_the_images_tokens(
    family: families.Conformance, prompts: list[Prompt]
) -> None:
    for prompt, (tokens, resolved) in zip(prompts, family.as_tokens(), strict=True):
        assert family.builder.build(tokens, resolved) == prompt


def test_transparent_pixels_lie_over_white_as_in_the_familys_own_processor(family: families.Conformance) -> None:
    picture = tiny_models.random_image(3, 90, 60).convert("RGBA")
    picture.putalpha(PIL.Image.linear_gradient("L").resize(picture.size))
    found = pixel_values(family, rgb_pixels(picture, None))
    if family.name in NO_TRANSPARENCY:
        with pytest.raises(RuntimeError, match="must match the size"):
            pixel_values(family, picture)
    else:
        assert torch.equal(found, pixel_values(family, picture))


def pixel_values(family: families.Conformance, picture: PIL.Image.Image) -> torch.Tensor:
    arguments = family.adapter.family.processor_arguments(family.adapter.model.source, ProcessorOptions())
    found = family.adapter.processor(images=[[picture]], return_tensors="pt", **arguments)
    return torch.as_tensor(found["pixel_values"])


def test_answers_depend_on_the_prompt(expected: list[list[int]]) -> None:
    assert len({tuple(answer) for answer in expected}) > len(expected) * 2 // 3


def test_cold(family: families.Conformance, prompts: list[Prompt], expected: list[list[int]]) -> None:
    assert offline.Session(family.offline).ask(prompts).token_ids == expected


def test_rows_from_redis(
    family: families.Conformance, prompts: list[Prompt], expected: list[list[int]], redis_server: EmbeddedRedis
) -> None:
    store = EmbeddingStore(redis_server.url, budget_s=5.0, ttl_s=600, max_entry_bytes=1 << 20)
    offline.fill_store(store, family.offline)
    session = offline.Session(family.offline, store=store, max_num_batched_tokens=smallest_step(family, prompts))
    assert session.ask(prompts).token_ids == expected
    assert any(step.fetches for step in session.steps)
    store.close()


def test_chunked(family: families.Conformance, prompts: list[Prompt], expected: list[list[int]]) -> None:
    budget = smallest_step(family, prompts)
    session = offline.Session(family.offline, max_num_batched_tokens=budget)
    assert session.ask(prompts).token_ids == expected
    if family.offline.runner.family.mask is not Mask.PROMPT:
        starts = [chunk.start for step in session.steps for chunk in step.chunks if chunk.num_tokens > 1]
        assert sum(start > 0 for start in starts) > len(prompts) // 2, "prompts are cut"


def test_preempted(family: families.Conformance, prompts: list[Prompt], expected: list[list[int]]) -> None:
    session = offline.Session(family.offline, num_blocks=families.few_blocks(prompts))
    assert session.ask(prompts).token_ids == expected
    assert sum(len(step.admitted) for step in session.steps) > len(prompts), "somebody came back"


def test_prefix_hits_that_end_inside_an_image(
    family: families.Conformance, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    """All prompts have been computed; then only the blocks up to the middle of each last image are kept."""
    session = offline.Session(family.offline, num_blocks=5000, cache_rows=4000)
    first = session.ask(prompts)
    pool = session.scheduler.kv_cache.pool
    for request in first.requests:
        for item in request.prompt.images[-1:]:
            middle = item.span.offset + item.span.length // 2
            named = [pool.find(name) for name in request.block_hashes[middle // families.BLOCK_SIZE :]]
            pool.withdraw([block for block in named if block is not None])
    again = session.ask(prompts)
    assert again.token_ids == expected
    # A hit can end inside an image only if half of the image is at least one block.
    is_inside = [
        item.span.offset < request.usage.cached_prompt_tokens < item.span.stop
        for request in again.requests
        for item in request.prompt.images[-1:]
        if item.span.length >= 2 * families.BLOCK_SIZE
    ]
    assert sum(is_inside) > len(is_inside) // 2, "hits end inside images"


def test_bfloat16_answers_are_within_its_precision(
    family: families.Conformance, prompts: list[Prompt], expected: list[list[int]]
) -> None:
    """Published models are in bfloat16. Rows must be close to float32, and the first token equal where it is clear."""
    config = replace(family.offline.runner.config, dtype=torch.bfloat16)
    vision, picture = load_vision_half(config.folder, torch.bfloat16), tiny_models.random_image(0, 80, 60)
    with torch.inference_mode():
        inputs = family.adapter.pixel_inputs(picture, ProcessorOptions())
        exact = family.adapter.image_rows(load_vision_half(config.folder, torch.float32), [inputs])[0]
        rows = family.adapter.image_rows(vision, [inputs])[0]
    assert rows.dtype is torch.bfloat16
    assert F.cosine_similarity(rows.float(), exact, dim=1).min() > 0.99
    runner = CPUModelRunner(config, family.offline.runner.family)
    answers = offline.Session(replace(family.offline, runner=runner)).ask(prompts, max_tokens=1).token_ids
    is_equal = [one[0] == other[0] for one, other in zip(answers, expected, strict=True)]
    assert sum(is_equal) > len(prompts) * 2 // 3


def test_families_with_a_window_or_states_are_those_tested(family: families.Conformance) -> None:
    runner = family.offline.runner
    assert (runner.get_kv_cache_spec().window is not None) == (family.name in WINDOWED)
    assert (runner.recurrent is not None) == (family.name in RECURRENT)


@pytest.mark.parametrize("name", sorted(WINDOWED))
def test_a_long_answer_holds_no_more_than_a_window_where_layers_have_one(
    name: str, tiny_family: Callable[[str], families.Conformance]
) -> None:
    family = tiny_family(name)
    long_question = family.long_question
    assert long_question is not None
    prompt, num_tokens = long_question.prompt, len(long_question.expected)
    session = offline.Session(family.offline, max_num_batched_tokens=smallest_step(family, [prompt]))
    assert session.ask([prompt], max_tokens=num_tokens).token_ids == [long_question.expected]
    window = family.offline.runner.get_kv_cache_spec().window
    assert window is not None
    num_sliding, num_full = [], []
    for step in session.steps:
        for chunk in step.chunks:
            assert chunk.sliding is not None
            if chunk.start >= len(prompt.token_ids):
                num_full.append(-(-(chunk.start + 1) // families.BLOCK_SIZE))
                num_sliding.append(num_full[-1] - chunk.sliding.first)
    assert max(num_sliding) <= -(-window.size // families.BLOCK_SIZE) + 1
    assert max(num_full) > 3 * max(num_sliding)
    pool = session.scheduler.kv_cache.sliding_pool
    assert pool is not None
    assert pool.num_free_blocks == pool.num_blocks


# In PaliGemma, generated tokens see less than the same tokens in a prompt, so a prefix cannot be reused.
@pytest.mark.parametrize("name", sorted(WINDOWED - {"paligemma2"}))
@pytest.mark.parametrize("num_lost_blocks", [0, 2, 100])
def test_a_prefix_is_used_where_layers_with_a_window_have_it_too(
    name: str, num_lost_blocks: int, tiny_family: Callable[[str], families.Conformance]
) -> None:
    """Asks the prompt with half of its answer; the other half must be the answer."""
    family = tiny_family(name)
    long_question = family.long_question
    assert long_question is not None
    prompt, half = long_question.prompt, len(long_question.expected) // 2
    session = offline.Session(family.offline)
    first = session.ask([prompt], max_tokens=2 * half).requests[0]
    longer = replace(prompt, token_ids=(*prompt.token_ids, *long_question.expected[:half]))
    num_known = len(longer.token_ids) // families.BLOCK_SIZE
    pool = session.scheduler.kv_cache.sliding_pool
    assert pool is not None
    lost = [pool.find(name) for name in first.block_hashes[max(0, num_known - num_lost_blocks) :]]
    pool.withdraw([block for block in lost if block is not None])
    again = session.ask([longer], max_tokens=half)
    assert again.token_ids == [long_question.expected[half:]]
    num_hit_blocks = -(-again.requests[0].usage.cached_prompt_tokens // families.BLOCK_SIZE)
    expected = max(0, num_known - num_lost_blocks)
    window = family.offline.runner.get_kv_cache_spec().window
    if window is not None and window.is_chunked and num_lost_blocks:
        # At the begin of a chunk, lost blocks are not needed.
        expected = max(
            expected, num_known - num_known % (math.lcm(window.size, families.BLOCK_SIZE) // families.BLOCK_SIZE)
        )
    assert num_hit_blocks == expected
