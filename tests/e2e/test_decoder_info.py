"""The SDK's calls about a running decoder: its model, its load, and prompts as tokens."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, fields

import pytest

from lookonce.aio import AsyncClient
from lookonce.client import Client
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.decoder_info import DecoderLoad, ModelInfo
from lookonce.errors import InvalidParameterError
from lookonce.generation import TextPrompt
from lookonce.images import ImageRef
from lookonce.local.local_stack import LocalStack
from lookonce.sdk import messages
from tests.e2e.pictures import QUESTION, fresh


@pytest.mark.parametrize(("kind", "message"), [(ModelInfo, pb.GetModelInfoResponse), (DecoderLoad, pb.GetLoadResponse)])
def test_every_field_of_the_contract_is_there(kind: type, message: type) -> None:
    assert {one.name for one in fields(kind)} == set(message.DESCRIPTOR.fields_by_name)  # type: ignore[attr-defined]


async def test_model_and_load_of_a_running_decoder(stack: LocalStack) -> None:
    async with AsyncClient.connect(stack.decoder_targets[0]) as client:
        info, load = await client.model_info(), await client.load()
    with Client.connect(stack.decoder_targets[0]) as sync:
        assert asdict(await asyncio.to_thread(sync.model_info)) == asdict(info)
        assert (await asyncio.to_thread(sync.load)).waiting_requests == 0
    assert info.model_type == "llava"
    assert info.encoder_target.endswith(stack.encoder_targets[0])
    assert min(info.vocab_size, info.max_context_tokens, info.num_kv_blocks, info.max_message_bytes) > 0
    assert 0.0 <= load.kv_cache_usage <= 1.0


@pytest.mark.parametrize("is_large", [False, True])
async def test_the_tokens_of_a_prompt_are_those_that_generate_counts(
    stack: LocalStack, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder has never seen the picture. A large one goes as its digest first."""
    if is_large:
        monkeypatch.setattr(messages, "SMALL_IMAGE_BYTES", 0)
    first, second = fresh(2)
    async with AsyncClient.connect(stack.decoder_targets[0]) as client:
        prompt = await client.tokenize(QUESTION, [first.data])
        usage = (await client.generate(QUESTION, [first.data], max_tokens=1)).usage
        (span,) = prompt.images
        assert (len(prompt.token_ids), span.length) == (usage.prompt_tokens, usage.image_tokens)
        assert span.digest == ImageRef.from_bytes(first.data).digest
        assert len(set(prompt.token_ids[span.offset : span.offset + span.length])) == 1
        placeholder = (await client.model_info()).image_placeholder
        text = await client.tokenize(TextPrompt(f"{placeholder} what", [second.data]))
        assert [one.digest for one in text.images] == [ImageRef.from_bytes(second.data).digest]
        words = await client.tokenize(TextPrompt("a blue square"))
        assert await client.detokenize(words.token_ids) == "a blue square"
        with pytest.raises(InvalidParameterError, match="token_ids"):
            await client.detokenize("words")  # type: ignore[arg-type]
    with Client.connect(stack.decoder_targets[0]) as sync:
        assert await asyncio.to_thread(sync.tokenize, QUESTION, [first.data]) == prompt
        assert await asyncio.to_thread(sync.detokenize, words.token_ids) == "a blue square"
