"""Answers with LoRA adapters: those of PEFT, however many adapters one batch has."""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from transformers import AutoTokenizer

from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.errors import ConfigurationError
from tests import tiny_models
from tests.decoder_svc.decoders import RunningDecoder, running_decoder
from tests.lora_folders import generated, lora_folder, with_adapter
from tests.tiny_families import gemma3, gemma4, lfm2_vl, mistral4, nemotron_h_omni, qwen3_5, qwen3_vl

NUM_TOKENS = 10
FAMILIES: dict[str, Callable[[pathlib.Path], pathlib.Path]] = {
    "llava": tiny_models.build_llava_clip,
    "qwen2_vl": tiny_models.build_qwen2_vl,
    "qwen3_vl": qwen3_vl.build,
    "gemma3": gemma3.build,
    "gemma4": gemma4.build,
    "qwen3_5": qwen3_5.build,
    "lfm2_vl": lfm2_vl.build,
    "nemotron_h_omni": nemotron_h_omni.build,
    "mistral4": mistral4.build,
}
# Names of adapters, with the settings that PEFT makes them with.
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"seed": 1},
    "queries": {"seed": 2, "target_modules": r".*(language_model|text_model).*\.(q_proj|v_proj)", "r": 8},
    "mlp": {
        "seed": 3,
        "target_modules": r".*(language_model|text_model).*\.(up_proj|down_proj|w3|w2)",
        "use_rslora": True,
    },
    "some": {
        "seed": 4,
        "rank_pattern": {"o_proj|out_proj": 3, r"layers\.1\.self_attn\.q_proj|layers\.2\.mixer\.q_proj": 7},
        "alpha_pattern": {"down_proj|w2": 2},
        "lora_alpha": 5,
    },
    "last layer": {"seed": 5, "target_modules": r".*(language_model|text_model).*layers\.1\..*\.(q_proj|down_proj|w2)"},
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 4},
    "speculation": {"speculative_tokens": 4, "speculative_ngram_min": 1},
    "process": {"engine": "process"},
    "two ranks": {"tensor_parallel_size": 2, "max_num_batched_tokens": 32, "max_num_seqs": 4},
}
# Types of models that are not split over ranks.
NOT_SPLIT = {"gemma4"}
PROMPTS = ["red", "what is in the picture, and where is it? " * 3, "a small cat near a red boat"]


@pytest.fixture(scope="module", params=FAMILIES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """The model under the name "", and its adapters."""
    root = tmp_path_factory.mktemp("lora")
    model = FAMILIES[request.param](root / "model")
    made = {name: lora_folder(root / name.replace(" ", "-"), model, **config) for name, config in ADAPTERS.items()}
    return {"": model, **made}


@pytest.fixture(scope="module")
def answers(folders: dict[str, pathlib.Path]) -> dict[tuple[str, str], tuple[list[int], list[int]]]:
    """Prompt and answer of PEFT by adapter and text."""
    tokenizer = AutoTokenizer.from_pretrained(folders[""])
    found = {}
    for name, folder in folders.items():
        model = with_adapter(folders[""], folder if name else None)
        for text in PROMPTS:
            ids = tokenizer(text)["input_ids"]
            found[name, text] = (ids, generated(model, ids, NUM_TOKENS))
    return found


def setting(folders: dict[str, pathlib.Path]) -> str:
    return ",".join(f"{name.replace(' ', '-')}={folder}" for name, folder in folders.items() if name)


async def ask(decoder: RunningDecoder, adapter: str, prompt_ids: list[int]) -> list[int]:
    request = pb.GenerateRequest(
        params=pb.GenerateParams(
            tokens=pb.TokenPrompt(token_ids=prompt_ids),
            sampling=pb.SamplingParams(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, temperature=0.0),
            adapter=adapter.replace(" ", "-"),
        )
    )
    response = await decoder.stub.Generate(request)
    return list(response.choices[0].token_ids)


@pytest.mark.parametrize("way", WAYS)
async def test_answers_are_those_of_peft(
    way: str, folders: dict[str, pathlib.Path], answers: dict[tuple[str, str], tuple[list[int], list[int]]]
) -> None:
    assert len({str(answer) for _, answer in answers.values()}) > len(folders), "the adapters change nothing"
    settings = {"dtype": "float32", "adapters": setting(folders), **WAYS[way]}
    if way == "two ranks" and json.loads((folders[""] / "config.json").read_text())["model_type"] in NOT_SPLIT:
        with pytest.raises(ConfigurationError, match="layers with different heads"):
            async with running_decoder(folders[""], **settings):
                pass
        return
    async with running_decoder(folders[""], **settings) as decoder:
        info = await decoder.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert list(info.adapters) == sorted(name.replace(" ", "-") for name in ADAPTERS)
        # Twice: the second time, prompts are in the prefix cache.
        for _ in range(2):
            found = await asyncio.gather(*(ask(decoder, name, ids) for (name, _), (ids, _) in answers.items()))
            assert found == [answer for _, answer in answers.values()]


async def test_adapters_share_no_prefix(folders: dict[str, pathlib.Path]) -> None:
    ids = list(range(100, 164))
    async with running_decoder(folders[""], dtype="float32", adapters=setting(folders), block_size=8) as decoder:

        async def cached(adapter: str) -> int:
            request = pb.GenerateRequest(
                params=pb.GenerateParams(
                    tokens=pb.TokenPrompt(token_ids=ids), sampling=pb.SamplingParams(max_tokens=1), adapter=adapter
                )
            )
            return int((await decoder.stub.Generate(request)).usage.cached_prompt_tokens)

        names = ["", "all", "queries"]
        assert [await cached(name) for name in names] == [0, 0, 0]
        assert all([await cached(name) for name in names])


async def test_an_unknown_adapter_is_named(folders: dict[str, pathlib.Path]) -> None:
    async with running_decoder(folders[""], adapters=f"one={folders['all']}") as decoder:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(decoder, "two", [3])
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "adapter: 'two' is not served; this server has one"
