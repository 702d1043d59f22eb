"""Settings of MiniCPM-V's image processor that its tiny model does not have: expansions equal the processor's own."""

from __future__ import annotations

import json
import pathlib
import random
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from lookonce.content_key import ProcessorOptions
from lookonce.errors import ImageTooLargeError, ModelFolderError
from lookonce.model.family_model import FamilyModel
from lookonce.model.model_folder import ModelFolder
from tests import tiny_models
from tests.tiny_families import minicpmv4_6

IMAGE = "<|image_pad|>"
_draw = random.Random(6)
SIZES = [(1, 1), (1, 200), (200, 1), (448, 448), (449, 448), (3000, 31), (8, 1500), (1600, 1200)]
SIZES += [(_draw.randint(1, 1500), _draw.randint(1, 1500)) for _ in range(12)]
PUBLISHED = {"scale_resolution": 448, "patch_size": 14, "max_slice_nums": 9}

Changed = Callable[..., pathlib.Path]


@pytest.fixture
def changed(family_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> Changed:
    """A copy of the tiny folder with other settings of the image processor."""

    def change(**settings: Any) -> pathlib.Path:
        path = shutil.copytree(family_folder("minicpmv4_6"), tmp_path / "model")
        edit(path, "preprocessor_config.json", settings)
        if "downsample_mode" in settings:
            edit(path, "config.json", {"downsample_mode": settings["downsample_mode"]})
        return path

    return change


def edit(path: pathlib.Path, name: str, fields: dict[str, Any]) -> None:
    (path / name).write_text(json.dumps(json.loads((path / name).read_text()) | fields))


@pytest.mark.parametrize(
    "settings",
    [
        PUBLISHED,
        PUBLISHED | {"downsample_mode": "4x"},
        {"slice_mode": False},
        {"max_slice_nums": 1},
        {"max_slice_nums": 2, "use_image_id": False},
    ],
)
def test_expansions_are_those_of_the_processor(settings: dict[str, Any], changed: Changed) -> None:
    path = changed(**settings)
    model, processor = FamilyModel.load(ModelFolder.open(path)), minicpmv4_6.load_processor(path)
    num_rows = set()
    for width, height in SIZES:
        shape = model.image_shape(width, height, ProcessorOptions())
        image = tiny_models.random_image(0, width, height)
        ids = processor(images=[[image, image]], text=f"{IMAGE} and {IMAGE}")["input_ids"][0]
        whole = "".join(IMAGE * part if isinstance(part, int) else str(part) for part in shape.parts)
        openings = [model.data.opening(model.source, number) for number in range(2)]
        assert processor.tokenizer.decode(ids) == f"{openings[0]}{whole} and {openings[1]}{whole}"
        num_rows.add(shape.num_rows)
    assert max(num_rows) <= model.sizing.largest.num_rows


def test_an_image_that_would_become_a_line_of_thousands_of_rows_is_refused(changed: Changed) -> None:
    model = FamilyModel.load(ModelFolder.open(changed(**PUBLISHED)))
    for size in ((10, 2001), (2001, 10)):
        with pytest.raises(ImageTooLargeError, match="too elongated"):
            model.image_shape(*size, ProcessorOptions())
    assert model.image_shape(10, 2000, ProcessorOptions()).num_rows == 113


def test_images_that_are_not_resized_are_refused(changed: Changed) -> None:
    path = changed(do_resize=False)
    with pytest.raises(ModelFolderError, match="do_resize"):
        FamilyModel.load(ModelFolder.open(path))


def test_a_tokenizer_without_the_markers_of_numbers_is_refused(changed: Changed) -> None:
    path = changed()
    config = json.loads((path / "tokenizer_config.json").read_text())
    for group in config.values():
        if isinstance(group, dict):
            group.pop("image_id_end_token", None)
    config.pop("image_id_end_token", None)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelFolderError, match=r"lacks something that MiniCPM-V 4\.6 needs: KeyError 'image_id_end_token'"
    ):
        FamilyModel.load(ModelFolder.open(path))


@pytest.mark.parametrize("insert_layer_id", [-1, 99])
def test_a_merger_behind_no_layer_is_refused(changed: Changed, insert_layer_id: int) -> None:
    """The tower would give more rows than the prompt has, and transformers takes the first ones."""
    path = changed()
    edit(path, "config.json", {"insert_layer_id": insert_layer_id})
    with pytest.raises(ModelFolderError, match=f"follows layer {insert_layer_id} "):
        FamilyModel.load(ModelFolder.open(path))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_slice_nums": 10**6}, "max_slice_nums of the image processor must be a number from 0 to 64"),
        ({"scale_resolution": 10**9}, "scale_resolution of the image processor must be a number from 1 to 8,192"),
        ({"scale_resolution": float("nan")}, "not nan"),
    ],
)
def test_settings_with_which_sizes_take_minutes_are_refused(
    changed: Changed, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelFolderError, match=named):
        FamilyModel.load(ModelFolder.open(changed(**settings)))
