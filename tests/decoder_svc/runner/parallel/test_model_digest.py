"""The digest of a model is that of its content, and two models have two."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decoder_svc.runner.parallel.model_digest import model_digest
from lookonce.model.model_folder import ModelFolder
from tests.conftest import DEMO_MODEL


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return shutil.copytree(DEMO_MODEL, tmp_path / "copy")


def weights(folder: pathlib.Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return found


def store(tensors: dict[str, Tensor], file: pathlib.Path) -> None:
    save_file(tensors, file, metadata={"format": "pt"})


def digest(folder: pathlib.Path) -> str:
    return model_digest(ModelFolder.open(folder))


def test_a_copy_has_the_same_also_in_other_files(folder: pathlib.Path) -> None:
    assert digest(folder) == digest(DEMO_MODEL)
    tensors = weights(folder)
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    (folder / "model.safetensors").unlink()
    for file, part in parts.items():
        store({name: tensors[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert digest(folder) == digest(DEMO_MODEL)


def test_each_tensor_counts(folder: pathlib.Path) -> None:
    tensors = weights(folder)
    found = {digest(DEMO_MODEL)}
    for name, tensor in tensors.items():
        changed = tensor.clone()
        changed.view(-1)[changed.numel() // 2] += 1
        store({**tensors, name: changed}, folder / "model.safetensors")
        found.add(digest(folder))
    assert len(found) == 1 + len(tensors)


def test_names_types_and_the_configuration_count(folder: pathlib.Path) -> None:
    tensors = weights(folder)
    names = [name for name in sorted(tensors) if "q_proj.weight" in name][:2]
    first, second = names
    store({**tensors, first: tensors[second], second: tensors[first]}, folder / "model.safetensors")
    found = {digest(DEMO_MODEL), digest(folder)}
    store({**tensors, first: tensors[first].to(torch.float64)}, folder / "model.safetensors")
    found.add(digest(folder))
    store(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "another": 1}))
    found.add(digest(folder))
    assert len(found) == 4
