"""Tokens that are not in the language model's table, in prompts, answers and inputs of layers, against `generate`."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoder_svc.runner.cpu.runner import CPUModelRunner
from decoder_svc.runner.language_pass import LanguagePass
from decoder_svc.scheduling.prompt import Prompt
from lookonce.model.structure.fixed_embeddings import embedders
from tests import tiny_models
from tests.decoder_svc.rounded_weights import round_weights
from tests.parity import families, offline
from tests.tiny_families import FAMILIES

HEAD, TABLE = "lm_head.weight", "model.language_model.embed_tokens.weight"
MAX_NEW_TOKENS = 12

FAMILIES_WITH_EMBEDDERS = pytest.mark.parametrize("name", ["gemma3n"])


def fixed_ids(config: Any) -> list[int]:
    return [token_id for ids in embedders(config).values() for token_id in ids]


def embedded_by(whole: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Returns the arguments that a whole model gives to its language model for a prompt of text."""
    noted: list[dict[str, Any]] = []

    def note(**arguments: Any) -> Any:
        noted.append(arguments)
        raise StopIteration

    whole.model.language_model.forward = note
    with pytest.raises(StopIteration), torch.inference_mode():
        whole(input_ids=ids[None])
    del whole.model.language_model.forward
    return noted[0]


@FAMILIES_WITH_EMBEDDERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_is_embedded_as_in_the_whole_model(
    name: str, dtype: torch.dtype, tiny_family: Callable[[str], families.Conformance]
) -> None:
    runner = tiny_family(name).offline.runner
    folder = runner.config.folder
    whole = tiny_models.load_model(folder).to(dtype)
    ids = torch.arange(whole.config.text_config.vocab_size)
    wanted = embedded_by(whole, ids)
    language = CPUModelRunner(replace(runner.config, dtype=dtype), runner.family).language
    assert isinstance(language, LanguagePass)
    found: dict[str, Any] = {}
    language._add_layer_inputs(found, ids)
    assert torch.equal(found["per_layer_inputs"], wanted["per_layer_inputs"])
    looked_up = language.look_up(ids)
    # A product of several rows rounds differently from that of one.
    rounding = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(looked_up, wanted["inputs_embeds"][0], rtol=rounding, atol=rounding)
    table = language.model.get_input_embeddings()(ids)
    others = [token_id for token_id in ids.tolist() if not torch.equal(table[token_id], looked_up[token_id])]
    assert others == fixed_ids(whole.config)


def generated(reference: Any, prompts: list[list[int]]) -> list[list[int]]:
    expected = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        limits = {"max_new_tokens": MAX_NEW_TOKENS, "min_new_tokens": MAX_NEW_TOKENS, "do_sample": False}
        with torch.inference_mode():
            output = reference.generate(given, attention_mask=torch.ones_like(given), **limits)
        expected.append(output[0, len(prompt) :].tolist())
    return expected


def check_answers(model: offline.OfflineModel, prompts: list[list[int]], expected: list[list[int]]) -> None:
    for budget in (2048, 3):
        session = offline.Session(model, max_num_batched_tokens=budget)
        asked = session.ask([Prompt(tuple(prompt)) for prompt in prompts], max_tokens=MAX_NEW_TOKENS)
        assert asked.token_ids == expected


def build(folder: pathlib.Path, name: str, *, is_tied: bool) -> None:
    """Writes a folder of a model whose answers have such tokens again and again."""
    FAMILIES[name].build(folder)
    config = json.loads((folder / "config.json").read_text())
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    if is_tied:
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
        del tensors[HEAD]
    ids = fixed_ids(tiny_models.load_model(folder).config)
    rows = tensors[TABLE if is_tied else HEAD]
    noise = torch.randn(len(ids), rows.shape[1], generator=torch.Generator().manual_seed(5))
    rows[ids] = 4 * rows.std() * noise
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, file, metadata={"format": "pt"})


@FAMILIES_WITH_EMBEDDERS
@pytest.mark.parametrize(("is_tied", "bits"), [(False, None), (False, 8), (True, None)])
def test_they_may_be_in_answers_and_in_prompts_without_an_image(
    name: str, is_tied: bool, bits: int | None, tmp_path: pathlib.Path
) -> None:
    build(tmp_path, name, is_tied=is_tied)
    plain = families.build(FAMILIES[name], tmp_path, 1).offline
    runner = CPUModelRunner(replace(plain.runner.config, quantize_bits=bits), plain.runner.family)
    if bits is not None:
        round_weights(tmp_path, bits)
    reference = tiny_models.load_model(tmp_path)
    fixed = fixed_ids(reference.config)
    prompts = [[2, 300, 301, token_id, 302, *fixed, 303 + token_id % 50] for token_id in fixed]
    expected = generated(reference, prompts)
    assert len({token_id for answer in expected for token_id in answer} & set(fixed)) > 1
    assert all(set(answer) & set(fixed) for answer in expected)
    check_answers(replace(plain, runner=runner), prompts, expected)


@pytest.mark.parametrize("name", ["muse_glimmer", "muse_spark"])
def test_placeholders_without_an_image_are_embedded_as_token_0(
    name: str, tiny_family: Callable[[str], families.Conformance]
) -> None:
    model = tiny_family(name).offline
    reference = tiny_models.load_model(model.runner.config.folder)
    config = reference.config
    placeholders = (config.image_token_id, config.video_token_id)
    prompts = [[3, 300, token_id, 301, token_id, token_id, 302] for token_id in (*placeholders, 0)]
    expected = generated(reference, prompts)
    assert expected[0] == expected[1] == expected[2]
    others = generated(reference, [[3, 300, 5, 301, 5, 5, 302]])
    assert others != expected[:1], "the token matters"
    check_answers(model, prompts, expected)
