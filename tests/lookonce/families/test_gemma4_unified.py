"""A folder of Gemma 4 Unified is served only if its files agree about patches and positions."""

from __future__ import annotations

import inspect
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lookonce.errors import ModelFolderError
from lookonce.model.family_model import FamilyModel
from lookonce.model.model_folder import ModelFolder

CONFIG, IMAGES, VIDEOS = "config.json", "preprocessor_config.json", "video_preprocessor_config.json"

pytestmark = pytest.mark.parametrize("name", ["gemma4_unified"])

Edited = Callable[[str, str, Mapping[str, Any]], ModelFolder]


@pytest.fixture
def edited(family_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> Edited:
    def edit(name: str, file: str, fields: Mapping[str, Any]) -> ModelFolder:
        shutil.copytree(family_folder(name), tmp_path / name)
        path = tmp_path / name / file
        content = json.loads(path.read_text()) if path.exists() else {}
        for field, value in fields.items():
            content[field] = content[field] | value if isinstance(value, dict) else value
        path.write_text(json.dumps(content))
        return ModelFolder.open(tmp_path / name)

    return edit


@pytest.mark.parametrize(
    ("file", "fields", "reason"),
    [
        (IMAGES, {"patch_size": 8}, r"are \(8, 3\), but those of the model are \(4, 3\)"),
        (IMAGES, {"pooling_kernel_size": 2}, r"are \(4, 2\), but those of the model are \(4, 3\)"),
        (IMAGES, {"max_soft_tokens": 140}, "is 140, but the model has 70 positions"),
        (IMAGES, {"do_resize": False}, "does not resize"),
        (CONFIG, {"text_config": {"num_kv_shared_layers": 3}}, "whose layers share keys"),
        (CONFIG, {"text_config": {"use_bidirectional_attention": "all"}}, "see later tokens"),
        (CONFIG, {"vision_config": None}, "has no vision tower"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused(
    name: str, file: str, fields: Mapping[str, Any], reason: str, edited: Edited
) -> None:
    with pytest.raises(ModelFolderError, match=reason):
        FamilyModel.load(edited(name, file, fields))


def test_videos_with_more_rows_than_positions_are_refused_and_images_are_not(name: str, edited: Edited) -> None:
    model = FamilyModel.load(edited(name, VIDEOS, {"max_soft_tokens": 140}))
    assert model.video is None
    assert "max_soft_tokens is 140, but the model has 70 positions" in model.no_video_reason


def test_sizes_are_computed_as_in_gemma4(name: str) -> None:
    """The functions of transformers are copies of each other, and `sizing` uses Gemma 4's."""
    from transformers.models.gemma4 import image_processing_pil_gemma4 as pil
    from transformers.models.gemma4_unified import image_processing_gemma4_unified as unified

    functions = [each.get_aspect_ratio_preserving_size for each in (pil, unified)]
    assert len(set(map(inspect.getsource, functions))) == 1, name
