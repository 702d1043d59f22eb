"""Each half is loaded from the same folder, complete, and without a single weight of the other."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoder_svc.runner.attention import PAGED_ATTENTION
from lookonce.errors import ModelFolderError
from lookonce.half_model import load_text_half, load_vision_half
from tests import tiny_models


@pytest.fixture(scope="module", params=sorted(tiny_models.BUILDERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path: pathlib.Path = tmp_path_factory.mktemp("models") / request.param
    return tiny_models.BUILDERS[request.param](path)


def test_the_halves_are_disjoint_and_together_the_whole(folder: pathlib.Path) -> None:
    text = dict(load_text_half(folder, torch.float32, PAGED_ATTENTION).named_parameters())
    vision = dict(load_vision_half(folder, torch.float32).named_parameters())
    whole = dict(tiny_models.load_model(folder).named_parameters())
    assert text.keys() & vision.keys() == set()
    assert text.keys() | vision.keys() == whole.keys()
    for name, tensor in (text | vision).items():
        assert torch.equal(tensor, whole[name]), name


def test_no_tensor_stays_on_the_meta_device(folder: pathlib.Path) -> None:
    for model in (load_text_half(folder, None, PAGED_ATTENTION), load_vision_half(folder, None)):
        assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}


def test_dtype_is_the_checkpoints_unless_overridden(folder: pathlib.Path) -> None:
    assert load_text_half(folder, None, PAGED_ATTENTION).dtype == torch.float32
    half = load_text_half(folder, torch.bfloat16, PAGED_ATTENTION)
    assert half.dtype == torch.bfloat16
    # Rotary frequencies lose too much in bfloat16.
    assert {tensor.dtype for name, tensor in half.named_buffers() if "inv_freq" in name} == {torch.float32}


def test_a_missing_tensor_is_refused_with_its_name(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    file = broken / "model.safetensors"
    tensors = load_file(file)
    victim = next(name for name in sorted(tensors) if "layers.0.mlp" in name and "vis" not in name)
    del tensors[victim]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"1 missing .*mlp"):
        load_text_half(broken, None, PAGED_ATTENTION)
    load_vision_half(broken, None)


def test_a_tensor_of_another_shape_is_refused(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    config = json.loads((broken / "config.json").read_text())
    config["text_config"]["intermediate_size"] *= 2
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match="text weights do not fit"):
        load_text_half(broken, None, PAGED_ATTENTION)
