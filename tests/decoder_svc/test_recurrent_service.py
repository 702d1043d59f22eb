"""A decoder whose model has recurrent layers: sizes, usage, embeddings, and what it refuses by name."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.runner_config import RunnerConfig
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.errors import ConfigurationError
from tests.decoder_svc.conftest import loaded
from tests.decoder_svc.decoders import params, running_decoder
from tests.tiny_families import qwen3_5

QUESTION = "why do you see a small cat near the red boat " * 4
# Bytes of one state of the tiny model: two layers of four 16 × 32 matrices, and of three inputs of 192 channels.
STATE_BYTES = 2 * 4 * (4 * 16 * 32 + 3 * 192)
# Bytes of a block of 16 tokens: only the layer with attention has keys and values, two heads of 32 elements.
BLOCK_BYTES = 2 * 16 * 2 * 32 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return qwen3_5.build(tmp_path_factory.mktemp("models") / "qwen3_5")


async def test_equal_questions_are_answered_alike_and_the_second_says_what_was_cached(folder: pathlib.Path) -> None:
    async with running_decoder(folder, dtype="float32", max_num_batched_tokens=64) as decoder:
        question = pb.GenerateRequest(params=params(QUESTION, max_tokens=12))
        first = await decoder.stub.Generate(question)
        second = await decoder.stub.Generate(question)
    assert second.choices[0].text == first.choices[0].text
    assert first.usage.cached_prompt_tokens == 0
    num_tokens = first.usage.prompt_tokens
    assert second.usage.cached_prompt_tokens == (num_tokens - 1) // 16 * 16


async def test_several_answers_to_one_question_equal_single_ones(folder: pathlib.Path) -> None:
    async with running_decoder(folder, dtype="float32", prefix_cache=True) as decoder:
        fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0.8, "seed": 3}
        alone = await decoder.stub.Generate(pb.GenerateRequest(params=params(QUESTION, **fields)))
        several = await decoder.stub.Generate(pb.GenerateRequest(params=params(QUESTION, n=3, **fields)))
    assert len(several.choices) == 3
    assert several.choices[0].text == alone.choices[0].text


@pytest.mark.parametrize("pooling", [pb.POOLING_LAST, pb.POOLING_MEAN])
async def test_embeddings_are_those_of_transformers(folder: pathlib.Path, pooling: pb.Pooling.ValueType) -> None:
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    asked = params(QUESTION)
    asked.ClearField("sampling")
    async with running_decoder(folder, dtype="float32", max_num_batched_tokens=32, max_num_seqs=4) as decoder:
        ids = (await decoder.stub.Tokenize(pb.TokenizeRequest(chat=asked.chat))).token_ids
        call = pb.EmbedRequest(params=asked, pooling=pooling, keep_length=True)
        found = await asyncio.gather(*(decoder.stub.Embed(call) for _ in range(3)))
    with torch.inference_mode():
        hidden = model.model(input_ids=torch.tensor([list(ids)])).last_hidden_state[0]
    expected = hidden[-1] if pooling == pb.POOLING_LAST else hidden.mean(0)
    for response in found:
        assert torch.allclose(torch.tensor(response.embedding), expected, atol=2e-4)


async def test_snapshots_take_at_most_a_quarter_of_the_pools_memory(folder: pathlib.Path) -> None:
    sizes: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": None, "max_num_seqs": 3}
    async with running_decoder(folder, **sizes, kv_cache_memory_bytes=1 << 30) as decoder:
        limits = decoder.service.engine.limits
        # A snapshot takes half of what so many blocks take, and there is room for all that requests can use.
        assert limits.snapshot_interval == -(-2 * STATE_BYTES // BLOCK_BYTES)
        most_blocks = 3 * limits.max_context_tokens // 16
        assert limits.num_state_snapshots == most_blocks // limits.snapshot_interval
    memory_bytes = 20 * STATE_BYTES
    async with running_decoder(folder, **sizes, kv_cache_memory_bytes=memory_bytes) as decoder:
        limits = decoder.service.engine.limits
        assert limits.num_state_snapshots == 5
        assert limits.num_kv_blocks == (memory_bytes - 5 * STATE_BYTES) // BLOCK_BYTES


async def test_speculation_changes_no_answer_and_has_states_of_its_own(folder: pathlib.Path) -> None:
    fields: dict[str, Any] = {"max_tokens": 40, "logit_bias": {20: 50.0, 30: 50.0, 40: 50.0}}
    asked = pb.GenerateRequest(params=params(QUESTION, **fields))
    async with running_decoder(folder, dtype="float32") as decoder:
        plain = await decoder.stub.Generate(asked)
    async with running_decoder(folder, dtype="float32", speculative_tokens=3, max_num_seqs=4) as decoder:
        assert decoder.service.engine.limits.num_draft_states == 3 * 4
        answers = await asyncio.gather(*(decoder.stub.Generate(asked) for _ in range(3)))
    assert {answer.choices[0].text for answer in answers} == {plain.choices[0].text}
    assert sum(answer.usage.accepted_draft_tokens for answer in answers) > 0


def test_a_device_that_does_not_compute_such_layers_refuses_the_model(folder: pathlib.Path) -> None:
    class OtherRunner(CPUModelRunner):
        serves_recurrent_layers = False

    family = loaded(folder).family
    with pytest.raises(
        ConfigurationError,
        match=r"Qwen3\.5 has recurrent layers \(.*\), which OtherRunner does not compute yet",
    ):
        OtherRunner(RunnerConfig(folder, torch.float32, block_size=8, num_threads=1), family)
