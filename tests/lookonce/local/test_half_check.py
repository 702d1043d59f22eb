"""The check of one half's weights from file headers, compared with loading it."""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lookonce.errors import ModelFolderError
from lookonce.local.half_check import check_half
from lookonce.model.half_model import Half, load_text_half, load_vision_half
from lookonce.model.model_folder import ModelFolder

pytestmark = pytest.mark.usefixtures("only_headers")


def _config(path: pathlib.Path) -> Any:
    return transformers.AutoConfig.from_pretrained(path)


# Models with untied weights, with tied weights, and with experts that are merged.
@pytest.mark.parametrize("name", ["gemma3", "paligemma", "qwen3_vl_moe"])
def test_the_memory_is_that_of_the_loaded_halves(name: str, built: Callable[[str], pathlib.Path]) -> None:
    folder = ModelFolder.open(built(name))
    loaded = {
        Half.VISION: load_vision_half(folder.path, None),
        Half.TEXT: load_text_half(folder.path, None, "sdpa"),
    }
    for half, model in loaded.items():
        weights = check_half(folder, _config(folder.path), half)
        parameters = list(model.parameters())
        assert weights.num_bytes == sum(parameter.nbytes for parameter in parameters)
        assert (weights.num_tensors, weights.dtype) == (len(parameters), torch.float32)


def test_with_another_transformers_the_half_is_loaded(
    built: Callable[[str], pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ModelFolder.open(built("gemma3"))
    known = [check_half(folder, _config(folder.path), half) for half in Half]
    monkeypatch.undo()
    monkeypatch.delattr(importlib.import_module("transformers.conversion_mapping"), "get_model_conversion_mapping")
    assert [check_half(folder, _config(folder.path), half) for half in Half] == known


def test_a_half_does_not_need_the_weights_of_the_other(copied: Callable[..., pathlib.Path]) -> None:
    path = copied("llava_clip")
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "vision_tower" not in name}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    folder = ModelFolder.open(path)
    assert check_half(folder, _config(path), Half.TEXT).num_tensors > 0
    with pytest.raises(ModelFolderError, match=r"vision weights do not fit the configuration: \d+ missing"):
        check_half(folder, _config(path), Half.VISION)


def test_a_file_that_is_damaged_after_the_folder_was_opened_is_named(copied: Callable[..., pathlib.Path]) -> None:
    path = copied("llava_clip")
    folder = ModelFolder.open(path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelFolderError, match=r"model\.safetensors cannot be read.*download it again"):
        check_half(folder, _config(path), Half.TEXT)
