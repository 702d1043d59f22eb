"""A folder gets a tower of timm only if its family knows the tower, and if its files agree about the rows."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lookonce.errors import ModelFolderError
from lookonce.families.timm_tower import tower_refusal
from lookonce.model.family_model import FamilyModel
from lookonce.model.model_folder import ModelFolder

CONFIG, IMAGES, WHOLE = "config.json", "preprocessor_config.json", "processor_config.json"
# Family, file, its changed fields, and a part of the reason.
CHANGES = [
    ("fast_vlm", CONFIG, {"vision_config": {"architecture": "resnet50"}}, "'resnet50', but only fastvit_mci3"),
    ("fast_vlm", CONFIG, {"vision_config": {"model_args": {"checkpoint_path": "/x"}}}, "not known: checkpoint_path"),
    ("fast_vlm", IMAGES, {"do_center_crop": False}, "does not crop"),
    ("fast_vlm", IMAGES, {"crop_size": {"height": 256, "width": 250}}, "256 × 250 pixels"),
    ("fast_vlm", WHOLE, {"patch_size": 32}, "is 32, but the tower's is 64"),
    ("fast_vlm", WHOLE, {"num_additional_image_tokens": 1}, "counts rows that the tower does not make"),
    ("fast_vlm", WHOLE, {"vision_feature_select_strategy": "default"}, "counts rows that the tower does not make"),
    ("gemma3n", CONFIG, {"vision_config": {"architecture": "resnet50"}}, "but only mobilenetv5_300m_enc"),
    ("gemma3n", CONFIG, {"vision_config": {"model_args": {"features_only": True}}}, "not known: features_only"),
    ("gemma3n", CONFIG, {"vision_config": {"model_args": {"channel_multiplier": 2}}}, "is 2, but must be at most 1"),
    ("gemma3n", CONFIG, {"vision_config": {"model_args": None}}, "is 16, but its vision tower makes 16 × 16 rows"),
    ("gemma3n", CONFIG, {"vision_soft_tokens_per_image": 9}, "is 9, but its vision tower makes 4 × 4 rows"),
    ("gemma3n", CONFIG, {"vision_config": {"vocab_size": 3}}, "between those of images and those of sound"),
    ("gemma3n", CONFIG, {"audio_config": {"vocab_size": 1}}, "behind those of sound"),
    ("gemma3n", IMAGES, {"do_resize": False}, "does not resize"),
    ("gemma3n", WHOLE, {"image_seq_length": 256}, "is 256, but an image has 16 rows"),
    ("perception_lm", CONFIG, {"vision_config": {"architecture": "vit_base_patch16_224"}}, "vit_pe_core_large"),
    ("perception_lm", CONFIG, {"vision_use_cls_token": False}, "vision_use_cls_token is False"),
    ("perception_lm", CONFIG, {"projector_pooling_ratio": 1}, r"are \(14, 2\), but those of the model are \(14, 1\)"),
    ("perception_lm", IMAGES, {"tile_size": 70}, r"is 70 pixels, but the tower takes images of \[56, 56\]"),
    ("perception_lm", IMAGES, {"do_resize": False}, "does not resize"),
    ("perception_lm", WHOLE, {"patch_size": 16}, r"are \(16, 2\), but those of the model are \(14, 2\)"),
]


def _config(model_type: str = "timm_wrapper", architecture: str = "tower", **arguments: Any) -> Any:
    vision = SimpleNamespace(model_type=model_type, architecture=architecture, model_args=arguments or None)
    return SimpleNamespace(vision_config=vision)


@pytest.mark.parametrize("architecture", ["tower", "tower.trained_elsewhere"])
@pytest.mark.parametrize("arguments", [{}, {"depth": 3}])
def test_a_known_tower_with_known_arguments_is_built(architecture: str, arguments: dict[str, Any]) -> None:
    assert tower_refusal(_config(architecture=architecture, **arguments), ["tower"], ["depth", "width"]) is None


# Some versions of timm take what is behind a slash or a colon for the name.
OTHER_PARTS = ["tower.x/other", "tower.hf-hub:x"]


@pytest.mark.parametrize(
    "architecture",
    ["towers", "hf-hub:somebody/tower", "local-dir:/tower", "", ".tower", *OTHER_PARTS],
)
def test_another_name_is_refused(architecture: str) -> None:
    assert "but only tower can be used" in (tower_refusal(_config(architecture=architecture), ["tower"], []) or "")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"width": [1] * 9}, "has 9 numbers, but at most 8"),
        ({"depth": 129}, "more than 128 layers"),
        ({"depth": [64, 65]}, "more than 128 layers"),
    ],
)
def test_towers_that_would_take_minutes_to_build_are_refused(arguments: dict[str, Any], reason: str) -> None:
    assert reason in (tower_refusal(_config(**arguments), ["tower"], ["depth", "width"]) or "")


def test_arguments_that_could_read_files_are_refused() -> None:
    refusal = tower_refusal(_config(depth=3, checkpoint_path="x", cache_dir="y"), ["tower"], ["depth"])
    assert refusal is not None
    assert refusal.endswith("not known: cache_dir, checkpoint_path")


@pytest.mark.parametrize("value", [5000, -1, [3, 1 << 40], (0, float("inf"))])
def test_numbers_that_no_tower_has_are_refused_before_memory_is_taken(value: Any) -> None:
    assert "depth of its vision tower must" in (tower_refusal(_config(depth=value), ["tower"], ["depth"]) or "")


def test_a_tower_of_transformers_is_refused() -> None:
    assert "'clip_vision_model'" in (tower_refusal(_config("clip_vision_model"), ["tower"], []) or "")


@pytest.mark.parametrize(("name", "file", "fields", "reason"), CHANGES)
def test_a_folder_whose_files_contradict_each_other_is_refused(
    name: str,
    file: str,
    fields: dict[str, Any],
    reason: str,
    family_folder: Callable[[str], pathlib.Path],
    tmp_path: pathlib.Path,
) -> None:
    folder = tmp_path / name
    shutil.copytree(family_folder(name), folder)
    content = json.loads((folder / file).read_text())
    for field, value in fields.items():
        is_nested = file == CONFIG and isinstance(value, dict)
        content[field] = {**content[field], **value} if is_nested else value
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ModelFolderError, match=reason):
        FamilyModel.load(ModelFolder.open(folder))
