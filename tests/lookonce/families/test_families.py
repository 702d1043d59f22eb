"""The expansion computed from an image's size alone equals the family's own processor, and so does its row count."""

from __future__ import annotations

import math
import pathlib
import random
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from encoder_svc.images.image_inputs import VisionAdapter
from lookonce.content_key import ProcessorOptions
from lookonce.errors import ImageTooLargeError, InvalidParameterError
from lookonce.families.registry import FAMILIES as DATA
from lookonce.model.family_model import FamilyModel
from lookonce.model.half_model import load_vision_half
from lookonce.model.model_folder import ModelFolder
from tests import tiny_models
from tests.tiny_families import FAMILIES
from tests.torchvision_families import HAS_TORCHVISION

NO_OPTIONS = ProcessorOptions()
_draw = random.Random(4)
SIZES = [(20, 15), (1, 1), (3, 500), (500, 3), (28, 28), (1000, 30), (199, 1), (640, 480)]
SIZES += [(_draw.randint(1, 400), _draw.randint(1, 400)) for _ in range(12)]

Folders = Callable[[str], pathlib.Path]


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> ModuleType:
    return FAMILIES[request.param]


def test_every_family_has_a_tiny_model(family_folder: Folders) -> None:
    assert {ModelFolder.open(family_folder(name)).model_type for name in FAMILIES} == {
        model_type for model_type, family in DATA.items() if family.imports_torchvision is HAS_TORCHVISION
    }
    assert all(model_type == data.model_type for model_type, data in DATA.items())


def test_row_counts_from_sizes_are_right_and_none_exceeds_the_largest(
    family: ModuleType, family_folder: Folders
) -> None:
    folder = ModelFolder.open(family_folder(family.NAME))
    model, adapter = FamilyModel.load(folder), VisionAdapter.load(folder)
    vision = load_vision_half(folder.path, torch.float32)
    counts = set()
    for index, size in enumerate(SIZES):
        try:
            shape = model.image_shape(*size, NO_OPTIONS)
        except ImageTooLargeError:
            assert max(size) > 100 * min(size) or min(size) == 1
            continue
        with torch.inference_mode():
            inputs = adapter.pixel_inputs(tiny_models.random_image(index, *size), NO_OPTIONS)
            (rows,) = adapter.image_rows(vision, [inputs])
        assert len(rows) == shape.num_rows, size
        assert shape.num_rows <= model.sizing.largest.num_rows, size
        counts.add(shape.num_rows)
    assert counts, "every size was refused"


def test_images_of_one_pass_have_the_rows_that_each_has_alone(family: ModuleType, family_folder: Folders) -> None:
    folder = ModelFolder.open(family_folder(family.NAME))
    adapter, vision = VisionAdapter.load(folder), load_vision_half(folder.path, torch.float32)
    images = [tiny_models.random_image(seed, 112, 112) for seed in range(3)]
    with torch.inference_mode():
        batch = [adapter.pixel_inputs(image, NO_OPTIONS) for image in images]
        assert all(batch[0].goes_with(inputs) for inputs in batch)
        together = adapter.image_rows(vision, batch)
        alone = [adapter.image_rows(vision, [inputs])[0] for inputs in batch]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(alone[0], alone[1], atol=1e-2)


def test_options_of_other_families_are_refused(family: ModuleType, family_folder: Folders) -> None:
    model = FamilyModel.load(ModelFolder.open(family_folder(family.NAME)))
    fewest = getattr(model.source.processor.size, "shortest_edge", None) or 1
    for options, is_known in (
        (ProcessorOptions(max_pixels=fewest), model.data.has_max_pixels),
        (ProcessorOptions(beside_others=True), model.data.depends_on_image_count),
    ):
        if is_known:
            assert model.image_shape(300, 300, options).num_rows < model.image_shape(300, 300, NO_OPTIONS).num_rows
        else:
            with pytest.raises(InvalidParameterError, match="leave it unset"):
                model.image_shape(300, 300, options)


@pytest.mark.parametrize("name", ["glm4v", "paddleocr_vl", "qwen2_vl", "qwen3_vl"])
def test_max_pixels_bounds_the_pixels_of_an_image(name: str, family_folder: Folders) -> None:
    adapter = VisionAdapter.load(ModelFolder.open(family_folder(name)))
    processor, image = adapter.processor, tiny_models.random_image(0, 1000, 1000)
    row_pixels = (processor.patch_size * processor.merge_size) ** 2
    largest = adapter.pixel_inputs(image, NO_OPTIONS).num_rows
    for num_rows in (largest, largest - 1, largest // 2):
        inputs = adapter.pixel_inputs(image, ProcessorOptions(max_pixels=num_rows * row_pixels))
        assert inputs.num_rows == math.isqrt(num_rows) ** 2, "as many as the bound allows for a square"
    with pytest.raises(InvalidParameterError, match="must be"):
        adapter.check_options(ProcessorOptions(max_pixels=2 * largest * row_pixels))


def test_a_grid_that_is_not_scaled_down_counts_as_the_largest(family_folder: Folders, tmp_path: pathlib.Path) -> None:
    """LLaVA-OneVision with the published canvases: 1200 × 1000 pixels give more rows than any full canvas."""
    model = FamilyModel.load(ModelFolder.open(family_folder("llava_onevision")))
    source = model.source
    source.config.vision_config.image_size, source.config.vision_config.patch_size = 384, 14
    source.config.vision_aspect_ratio = "anyres_max_9"
    sides = range(384, 2305, 384)
    source.processor.image_grid_pinpoints = [[height, width] for height in sides for width in sides]
    sizing = model.data.sizing(source)
    assert sizing.shape(1200, 1000, NO_OPTIONS).num_rows == 8748 <= sizing.largest.num_rows
