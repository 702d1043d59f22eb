"""Folders of adapters: what changes results is honoured or refused by name."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoder_svc.runner.adapters.low_rank import TextLinears, read_low_ranks
from lookonce.errors import ConfigurationError, ModelFolderError
from lookonce.model.adapter_folder import AdapterFolder, open_adapters
from lookonce.model.half_model import load_text_half
from tests.conftest import DEMO_MODEL
from tests.lora_folders import lora_folder

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return lora_folder(tmp_path / "adapter", DEMO_MODEL)


def change(folder: pathlib.Path, **values: Any) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; LORA is served"),
        ({"use_dora": True}, "use_dora is set"),
        ({"bias": "all"}, "bias is set"),
        ({"lora_bias": True}, "lora_bias is set"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is set"),
        ({"a_new_setting": 1}, "the setting a_new_setting of adapter_config.json is not known"),
        ({"r": 0}, "the rank must be 1 to 512, not 0"),
        ({"r": "8"}, "the rank must be 1 to 512"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"rank_pattern": {"q_proj": 1000}}, "the rank must be 1 to 512, not 1000"),
    ],
)
def test_settings_that_are_not_served_are_named(folder: pathlib.Path, values: dict[str, Any], message: str) -> None:
    change(folder, **values)
    with pytest.raises(ModelFolderError) as caught:
        AdapterFolder.open("one", folder)
    assert message in str(caught.value)


def test_a_setting_names_several_adapters(folder: pathlib.Path) -> None:
    assert open_adapters("") == ()
    first, second = open_adapters(f" a={folder}, b={folder}")
    assert (first.name, second.name) == ("a", "b")
    assert first.fingerprint == second.fingerprint
    change(folder, lora_alpha=9)
    assert AdapterFolder.open("a", folder).fingerprint != first.fingerprint
    for text, message in (
        ("a", "must be NAME=FOLDER"),
        (f"a={folder},a={folder}", "is there twice"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            open_adapters(text)
    for text, message in ((f"a/b={folder}", "must be 1 to 64 characters"), ("a=/nowhere", "is missing")):
        with pytest.raises(ModelFolderError, match=message):
            open_adapters(text)


@pytest.mark.parametrize("part", ["vision", "head", "one matrix", "rank", "embedding", "nan", "broken", "other name"])
def test_weights_that_do_not_fit_are_named(folder: pathlib.Path, part: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    layer = next(key for key in tensors if key.endswith("q_proj.lora_A.weight"))
    vision = layer.replace("language_model.layers", "vision_tower.vision_model.encoder.layers")
    if part == "vision":
        tensors[vision] = tensors.pop(layer)
        tensors[vision.replace("lora_A", "lora_B")] = tensors.pop(layer.replace("lora_A", "lora_B"))
    elif part == "head":
        for matrix in ("lora_A", "lora_B"):
            tensors[f"base_model.model.lm_head.{matrix}.weight"] = torch.zeros(4, 4)
    elif part == "one matrix":
        del tensors[layer]
    elif part == "rank":
        tensors[layer] = tensors[layer][:2].contiguous()
    elif part == "embedding":
        tensors["base_model.model.model.language_model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 4)
    elif part == "nan":
        tensors[layer] *= float("nan")
    elif part == "other name":
        tensors[layer.replace("q_proj", "qkv_proj")] = tensors[layer]
    save_file(tensors, folder / WEIGHTS)
    if part == "broken":
        (folder / WEIGHTS).write_bytes(b"no tensors")
    messages = {
        "vision": "which is in the vision half",
        "head": "which is no linear layer in the layers",
        "one matrix": "has one matrix of two",
        "rank": "they must be",
        "embedding": "is no matrix of a linear layer",
        "nan": "have infinite numbers",
        "broken": "cannot be read",
        "other name": "which is no linear layer",
    }
    model = load_text_half(DEMO_MODEL, torch.float32, "eager")
    with pytest.raises(ModelFolderError, match=messages[part]):
        read_low_ranks(AdapterFolder.open("one", folder), TextLinears(model))


def test_names_of_older_versions_are_understood(folder: pathlib.Path) -> None:
    model = load_text_half(DEMO_MODEL, torch.float32, "eager")
    expected = read_low_ranks(AdapterFolder.open("one", folder), TextLinears(model))
    tensors = load_file(folder / WEIGHTS)
    for prefix in ("language_model.model.layers", "model.layers"):
        save_file(
            {key.replace("model.language_model.layers", prefix): tensor for key, tensor in tensors.items()},
            folder / WEIGHTS,
        )
        found = read_low_ranks(AdapterFolder.open("one", folder), TextLinears(model))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name].up, expected[name].up) for name in found)
