"""A folder of Step 3.7 is served only if its rows and bounds are what its files say; tiles are the processor's own."""

from __future__ import annotations

import json
import pathlib
import random
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from lookonce.content_key import ProcessorOptions
from lookonce.errors import ImageTooLargeError, ModelFolderError
from lookonce.families import step3p7
from lookonce.families.base import FamilySource
from lookonce.model.family_model import FamilyModel
from lookonce.model.half_model import load_text_half
from lookonce.model.model_folder import ModelFolder
from tests import tiny_models
from tests.tiny_families import FAMILIES

pytestmark = pytest.mark.parametrize("name", ["step3p7"])

CONFIG, IMAGES = "config.json", "preprocessor_config.json"
NUM_SIZES = 40

Folders = Callable[[str], pathlib.Path]


@pytest.mark.parametrize(
    ("file", "fields", "reason"),
    [
        (IMAGES, {"size": {"height": 48, "width": 64}}, "makes images of 48 × 64, not squares"),
        (IMAGES, {"vision_patch_size": 8}, "squares of 48 pixels have 1 rows by its image processor, .* gives 9"),
        (IMAGES, {"patch_size": 36}, "squares of 36 pixels have 4 rows by its image processor, .* gives 9"),
        (IMAGES, {"patch_size": 12}, "squares of 12 pixels have 0 rows"),
        (IMAGES, {"downsampler_stride": 0}, "downsampler_stride .* must be a whole number ≥ 1, not 0"),
        (IMAGES, {"max_image_size": "large"}, "max_image_size .* must be a whole number ≥ 1, not 'large'"),
        (CONFIG, {"swiglu_limits": [None, 1.0]}, "swiglu_limits of its text model has 2 entries for 4 layers"),
        (CONFIG, {"swiglu_limits_shared": [0, 0, -2, 0]}, "swiglu_limits_shared .* must be numbers ≥ 0, not -2"),
        (CONFIG, {"swiglu_limits": [0, float("nan"), 0, 0]}, "swiglu_limits .* must be numbers ≥ 0, not nan"),
        (CONFIG, {"num_experts_per_tok": 5}, r"between 1 and n_routed_experts \(4\), not 5"),
        (CONFIG, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number > 0, not 0"),
        (CONFIG, {"num_sliding_attention_heads": 0}, "num_sliding_attention_heads must be a number from 1"),
        (CONFIG, {"per_layer_config": {"1": {"head_dim": 32}}}, "layers that differ in head_dim, which is not served"),
        (CONFIG, {"per_layer_config": {"1": {"num_key_value_heads": 1}}}, "layers that differ in num_key_value_heads"),
        (CONFIG, {"per_layer_config": {"1": {"sliding_window": 3}}}, "layers that differ in sliding_window"),
        (CONFIG, {"per_layer_config": {"1": {"num_attention_heads": 8, "skip": ["mlp"]}}}, "that differ in skip"),
        (CONFIG, {"per_layer_config": {"1": {"num_attention_heads": 5}}}, "5, which num_key_value_heads = 2 does not"),
        (CONFIG, {"sliding_window": None}, "sliding_window in config.json must be a number ≥ 1, not None"),
        (CONFIG, {"mlp_layer_types": ["dense"] * 3 + ["wide"]}, "cannot read"),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused_in_one_line(
    name: str, file: str, fields: Mapping[str, Any], reason: str, family_folder: Folders, tmp_path: pathlib.Path
) -> None:
    path = pathlib.Path(shutil.copytree(family_folder(name), tmp_path / name))
    content = json.loads((path / file).read_text())
    (content["text_config"] if file == CONFIG else content).update(fields)
    (path / file).write_text(json.dumps(content))
    with pytest.raises(ModelFolderError, match=reason) as raised:
        FamilyModel.load(ModelFolder.open(path))
    assert "\n" not in str(raised.value)


def test_expansions_are_those_of_the_processor(name: str, family_folder: Folders) -> None:
    folder = family_folder(name)
    model, whole = FamilyModel.load(ModelFolder.open(folder)), FAMILIES[name].load_processor(folder)
    rng = random.Random(5)
    kinds = set()
    for index in range(NUM_SIZES):
        width, height = (int(10 ** rng.uniform(0.3, 2.7)) for _ in range(2))
        shape = model.image_shape(width, height, ProcessorOptions())
        inputs = whole.image_processor(images=[tiny_models.random_image(index, width, height)], return_tensors="pt")
        expected = whole.replace_image_token(inputs, 0)
        found = "".join("<im_patch>" * part if isinstance(part, int) else str(part) for part in shape.parts)
        assert found == expected, (width, height)
        kinds.add((found.count("<patch_start>") > 0, "<patch_newline>" in found))
    assert len(kinds) == 3, "without tiles, with one line of them, and with several"


def test_tiles_are_counted_with_the_published_settings(name: str, family_folder: Folders) -> None:
    from transformers.models.step3p7.image_processing_step3p7 import Step3p7ImageProcessor

    source = FamilyModel.load(ModelFolder.open(family_folder(name))).source
    sizing = step3p7.FAMILY.sizing(FamilySource(source.config, Step3p7ImageProcessor(), {}, {}))
    rows = {size: sizing.shape(*size, ProcessorOptions()).num_rows for size in [(700, 700), (1000, 800), (9000, 9000)]}
    assert rows == {(700, 700): 169, (1000, 800): 169 + 4 * 81, (9000, 9000): 169 + 36 * 81}
    with pytest.raises(ValueError, match="more than 128 tiles"):
        sizing.shape(32, 20_000, ProcessorOptions())
    with pytest.raises(ValueError, match="leaves no pixels"):
        sizing.shape(32, 200_000, ProcessorOptions())


def test_an_image_that_is_too_elongated_is_too_large(name: str, family_folder: Folders) -> None:
    model = FamilyModel.load(ModelFolder.open(family_folder(name)))
    with pytest.raises(ImageTooLargeError, match="6400×40"):
        model.image_shape(6400, 40, ProcessorOptions())


def test_layers_that_predict_further_tokens_are_not_loaded(name: str, family_folder: Folders) -> None:
    text = load_text_half(family_folder(name), torch.float32, "sdpa")
    assert len(text.model.language_model.layers) == 4
    assert {layer.self_attn.num_heads for layer in text.model.language_model.layers} == {4, 6}
