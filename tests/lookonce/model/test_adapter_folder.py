"""Folders of adapters: what changes results is honoured or refused by name."""

from __future__ import annotations

import json
import os
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
from tests.tiny_families import FAMILIES

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
        ({"use_dora": True}, "use_dora is 'True' in adapter_config.json, and such adapters are not served"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias is 'True'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is "),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"a_new_setting": 1}, "the setting 'a_new_setting' of adapter_config.json is not known"),
        ({"r": 0}, "the rank must be a whole number from 1 to 512, not 0"),
        ({"r": "8"}, "the rank must be a whole number from 1 to 512"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"rank_pattern": {"q_proj": 1000}}, "the rank must be a whole number from 1 to 512, not 1000"),
        # These would take for ever, or much memory.
        ({"rank_pattern": {"((a|[a-z._0-9])*)*#": 4}}, "is not served; a pattern has names, dots"),
        ({"rank_pattern": {".*a.*b.*c": 4}}, "is not served; a pattern has names, dots"),
        ({"alpha_pattern": {"a{99999999999999999999}": 4}}, "is not served; a pattern has names, dots"),
        ({"rank_pattern": {"(" * 5000: 4}}, "is not served; a pattern has names, dots"),
        ({"rank_pattern": {"q_proj(": 4}}, "is no regular expression"),
        ({"rank_pattern": {f"q{index}": 4 for index in range(1025)}}, "has 1025 patterns, the limit is 1024"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number up to 1e+06"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number up to 1e+06"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern must be a number"),
        ({"use_rslora": 1}, "use_rslora must be true or false"),
        ({"half \ud800": 1}, r"the setting 'half \ud800' of adapter_config.json is not known"),
        ({"target_modules": "x" * (1 << 20)}, "adapter_config.json has more than 1048576 bytes"),
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
        (f"a/b={folder}", "must be 1 to 64 characters"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            open_adapters(text)
    with pytest.raises(ModelFolderError, match="is missing"):
        open_adapters("a=/nowhere")


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("kind", ["pipe", "endless", "folder", "loop"])
def test_what_is_no_regular_file_is_not_read(folder: pathlib.Path, file: str, kind: str) -> None:
    (folder / file).unlink()
    if kind == "pipe":
        os.mkfifo(folder / file)
    elif kind == "endless":
        (folder / file).symlink_to("/dev/zero")
    elif kind == "folder":
        (folder / file).mkdir()
    else:
        (folder / file).symlink_to(folder / file)
    with pytest.raises(ModelFolderError, match=f"adapter one: {file} (is no regular file|cannot be read)"):
        AdapterFolder.open("one", folder)


def test_a_file_that_changes_is_not_mixed(folder: pathlib.Path) -> None:
    opened = AdapterFolder.open("one", folder)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + b"x")
    with pytest.raises(ModelFolderError, match="has changed while it was loaded"):
        opened.read_weights()


@pytest.mark.parametrize(
    "part",
    ["header", "huge", "vision", "head", "one matrix", "rank", "embedding", "nan", "infinity", "broken", "other name"],
)
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
    elif part == "huge":
        tensors[layer] += 3e38
    elif part == "nan":
        tensors[layer].view(-1)[5] = float("nan")
    elif part == "infinity":
        tensors[layer.replace("lora_A", "lora_B")].view(-1)[5] = float("inf")
    elif part == "other name":
        tensors[layer.replace("q_proj", "qkv_proj")] = tensors[layer].clone()
    save_file(tensors, folder / WEIGHTS)
    if part == "broken":
        (folder / WEIGHTS).write_bytes(b"no tensors")
    if part == "header":
        (folder / WEIGHTS).write_bytes((5 << 20).to_bytes(8, "little") + b" " * (5 << 20))
    messages = {
        "header": "the list of its matrices has more than 4194304 bytes",
        "huge": "have numbers that are not within ±65504",
        "vision": "which is in the vision half",
        "head": "which is no linear layer in the layers",
        "one matrix": "has one matrix of two",
        "rank": "they must be",
        "embedding": "is no LoRA matrix of a linear layer",
        "nan": "adapter one: the matrices of .*q_proj hold NaN or infinity",
        "infinity": "adapter one: the matrices of .*q_proj hold NaN or infinity",
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


@pytest.mark.parametrize("name", ["llama4"])
def test_a_router_that_returns_more_than_a_linear_layer_is_refused(name: str, tmp_path: pathlib.Path) -> None:
    path = FAMILIES[name].build(tmp_path / name)
    linears = TextLinears(load_text_half(path, torch.float32, "eager"))
    assert read_low_ranks(AdapterFolder.open("one", lora_folder(tmp_path / "one", path)), linears)
    of_routers = lora_folder(tmp_path / "two", path, target_modules=r".*\.router")
    with pytest.raises(ModelFolderError, match=r"feed_forward\.router, which is no linear layer"):
        read_low_ranks(AdapterFolder.open("two", of_routers), linears)
