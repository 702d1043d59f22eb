"""Decoders with quantized weights give the answers of a model folder with the weights that they stand for."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from lookonce.decoder.v1 import decoder_service_pb2 as pb
from tests import tiny_models
from tests.decoder_svc.decoders import RunningDecoder, params, running_decoder
from tests.decoder_svc.rounded_weights import round_weights
from tests.lora_folders import lora_folder
from tests.quantized_folders import FORMS, store_quantized

TEXTS = ["what is there", "a small cat near a red boat and why do you see it " * 3]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """The model, the same model with weights of 4 bits, and an adapter."""
    root = tmp_path_factory.mktemp("quantized")
    whole, rounded = (tiny_models.build_llava_clip(root / name) for name in ("whole", "rounded"))
    round_weights(rounded, 4)
    return {"whole": whole, "rounded": rounded, "adapter": lora_folder(root / "adapter", whole, seed=1)}


async def answers(decoder: RunningDecoder, **settings: Any) -> list[list[int]]:
    found = []
    for text in TEXTS:
        request = pb.GenerateRequest(params=params(text, max_tokens=12, ignore_eos=True))
        request.params.adapter = settings.get("adapter", "")
        answer = await decoder.stub.Generate(request, timeout=120)
        found.append(list(answer.choices[0].token_ids))
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"speculative_tokens": 4, "speculative_ngram_min": 1},
        {"max_num_batched_tokens": 24, "max_num_seqs": 4},
        {"engine": "process"},
    ],
    ids=str,
)
async def test_answers_are_those_of_the_rounded_weights(
    folders: dict[str, pathlib.Path], settings: dict[str, Any]
) -> None:
    async with running_decoder(folders["rounded"], **settings) as decoder:
        expected = await answers(decoder)
    async with running_decoder(folders["whole"], quantize="int4", **settings) as decoder:
        assert await answers(decoder) == expected
    async with running_decoder(folders["whole"], **settings) as decoder:
        assert await answers(decoder) != expected


async def test_adapters_are_added_to_the_rounded_weights(folders: dict[str, pathlib.Path]) -> None:
    adapters = f"one={folders['adapter']}"
    async with running_decoder(folders["rounded"], adapters=adapters) as decoder:
        expected, base = await answers(decoder, adapter="one"), await answers(decoder)
    async with running_decoder(folders["whole"], adapters=adapters, quantize="int4") as decoder:
        assert await answers(decoder, adapter="one") == expected
        assert await answers(decoder) == base
    assert expected != base


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        ("awq", {}),
        ("gptq-act-order", {"max_num_batched_tokens": 24, "max_num_seqs": 4}),
        ("compressed-int8", {"speculative_tokens": 4, "speculative_ngram_min": 1}),
        ("fp8-block", {"engine": "process"}),
    ],
    ids=str,
)
async def test_stored_codes_and_adapters_on_them_are_served(
    folders: dict[str, pathlib.Path], form: str, settings: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    stored, whole = (tiny_models.build_llava_clip(tmp_path / name) for name in ("stored", "whole"))
    store_quantized(stored, FORMS[form], whole)
    adapters = f"one={folders['adapter']}"
    found = []
    for folder in (whole, stored):
        async with running_decoder(folder, adapters=adapters, **settings) as decoder:
            found.append((await answers(decoder), await answers(decoder, adapter="one")))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
