"""A folder of Muse Spark is served only if its text model is what its configuration says, and without sound."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lookonce.errors import ModelFolderError, UnsupportedError
from lookonce.model.family_model import FamilyModel
from lookonce.model.half_model import load_text_half, load_vision_half
from lookonce.model.model_folder import ModelFolder

pytestmark = pytest.mark.parametrize("name", ["muse_spark"])

Folders = Callable[[str], pathlib.Path]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"residual_gate_temperature": 0.0}, "residual_gate_temperature of its text model must be a number > 0, not 0"),
        ({"final_logit_softcapping": -1.0}, r"final_logit_softcapping of its text model must be .* > 0, not -1\.0"),
        ({"mlp_layer_types": ["sparse", "dense", "moe", "dense"]}, "cannot read .* entries must be in"),
        ({"mlp_layer_types": ["sparse"]}, "cannot read .* must be equal to the number of `mlp_layer_types`"),
        ({"layer_rope_theta": [0, 1e4, 1e4]}, "layer_rope_theta of its text model has 3 entries for 4 layers"),
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok .* between 1 and num_local_experts \(4\), not 5"),
        ({"num_experts_per_tok": 0}, r"num_experts_per_tok .* between 1 and num_local_experts \(4\), not 0"),
        ({"residual_gate_temperature": "warm"}, "cannot read|must be a number"),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused_in_one_line(
    name: str, fields: dict[str, Any], reason: str, family_folder: Folders, tmp_path: pathlib.Path
) -> None:
    path = pathlib.Path(shutil.copytree(family_folder(name), tmp_path / name))
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= fields
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match=reason) as raised:
        FamilyModel.load(ModelFolder.open(path))
    assert "\n" not in str(raised.value)


def test_no_half_has_the_encoder_of_sound(name: str, family_folder: Folders) -> None:
    for model in (
        load_vision_half(family_folder(name), torch.float32),
        load_text_half(family_folder(name), None, "sdpa"),
    ):
        assert not [each for each, _ in model.named_parameters() if "audio" in each]


def test_videos_are_refused(name: str, family_folder: Folders) -> None:
    with pytest.raises(UnsupportedError, match="Muse Spark takes no videos"):
        FamilyModel.load(ModelFolder.open(family_folder(name))).frame_size(100, 100, 4, None)
