"""The prefix cache over gRPC: what it saves is reported, what it must not share it does not share."""

from __future__ import annotations

from typing import Unpack

import pytest

from lookonce.aio import AsyncClient
from lookonce.generation import GenerateOptions, Generation
from lookonce.local.local_stack import LocalStack
from tests.e2e.pictures import QUESTION, Picture, fresh

BLOCK_SIZE = 16


async def ask(
    stack: LocalStack, picture: Picture, question: str = QUESTION, **options: Unpack[GenerateOptions]
) -> Generation:
    options.setdefault("max_tokens", 16)
    async with AsyncClient.connect(stack.decoder_targets[0]) as client:
        return await client.generate(question, images=[picture.data], **options)


async def test_the_same_question_again_computes_the_rest_of_the_last_block(stack: LocalStack) -> None:
    (picture,) = fresh(1)
    first, again = await ask(stack, picture), await ask(stack, picture)
    assert first.usage.cached_prompt_tokens == 0
    assert again.usage.cached_prompt_tokens == (again.usage.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert again.usage.encoded_image_tokens == 0
    assert again.usage.skipped_image_tokens + again.usage.cached_image_tokens == again.usage.image_tokens
    assert again.text == first.text == picture.answer


async def test_another_question_about_a_picture_fetches_only_rows_behind_the_hit(stack: LocalStack) -> None:
    (picture,) = fresh(1)
    await ask(stack, picture)
    other = await ask(stack, picture, "How many shapes are there?")
    usage = other.usage
    assert 0 < usage.cached_prompt_tokens < usage.prompt_tokens
    assert usage.skipped_image_tokens > 0
    assert usage.encoded_image_tokens == 0
    assert usage.skipped_image_tokens + usage.cached_image_tokens == usage.image_tokens


@pytest.mark.parametrize("options", [GenerateOptions(cache_salt="other"), GenerateOptions(bypass_prefix_cache=True)])
async def test_a_salt_and_a_bypass_find_nothing_and_answer_the_same(
    stack: LocalStack, options: GenerateOptions
) -> None:
    (picture,) = fresh(1)
    await ask(stack, picture)
    apart = await ask(stack, picture, **options)
    assert apart.usage.cached_prompt_tokens == apart.usage.skipped_image_tokens == 0
    assert apart.text == picture.answer


async def test_those_who_know_a_salt_share(stack: LocalStack) -> None:
    (picture,) = fresh(1)
    await ask(stack, picture, cache_salt="team-a")
    assert (await ask(stack, picture, cache_salt="team-a")).usage.cached_prompt_tokens > 0
    assert (await ask(stack, picture)).usage.cached_prompt_tokens == 0


def fetched(stack: LocalStack) -> dict[str, float]:
    """Sums of the first decoder over both tiers."""
    names = ("embedding_fetch_rows_total", "embedding_fetch_bytes_total", "prefix_cache_hit_tokens_total")
    return {name: stack.metric(stack.decoders[:1], f"lookonce_decoder_{name}") for name in names}


async def test_metrics_count_fetched_rows_and_prefix_cache_hits(stack: LocalStack) -> None:
    (picture,) = fresh(1)
    before = fetched(stack)
    first = await ask(stack, picture)
    after_first = fetched(stack)
    assert after_first["embedding_fetch_rows_total"] - before["embedding_fetch_rows_total"] == first.usage.image_tokens
    assert after_first["embedding_fetch_bytes_total"] > before["embedding_fetch_bytes_total"]
    again = await ask(stack, picture)
    after_both = fetched(stack)
    hits = after_both["prefix_cache_hit_tokens_total"] - after_first["prefix_cache_hit_tokens_total"]
    assert hits == again.usage.cached_prompt_tokens > 0
    assert after_both["embedding_fetch_rows_total"] == after_first["embedding_fetch_rows_total"]
