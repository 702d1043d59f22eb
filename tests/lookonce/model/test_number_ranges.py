"""Numbers that no model has are told with their file and field before anything is built from them."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any

import pytest
from transformers.image_utils import SizeDict

from lookonce.errors import ModelFolderError
from lookonce.model.number_ranges import check_config_numbers, check_processor_numbers

FOLDER = pathlib.Path("folder")
IMAGES = FOLDER / "preprocessor_config.json"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"text_config": {"rope_parameters": {"rope_theta": 0}}},
            "text_config.rope_parameters.rope_theta must be a number > 0",
        ),
        ({"text_config": {"rope_parameters": {"rope_theta": float("nan")}}}, "must be a number > 0, not nan"),
        ({"vision_config": {"num_channels": -1}}, "num_channels must be a number from 1 to 16,777,216, not -1"),
        ({"vision_config": {"mlp_ratio": 10**9}}, "mlp_ratio must be a number from 0 to"),
        ({"text_config": {"moe_intermediate_size": 10**9}}, "moe_intermediate_size must be a number from 0 to"),
        ({"text_config": {"rms_norm_eps": -1e-6}}, "rms_norm_eps must be a number ≥ 0, not -1e-06"),
        ({"vision_config": {"projector_dropout": 1.5}}, "projector_dropout must be a number from 0 to 1, not 1.5"),
        ({"text_config": {"rope_parameters": {"partial_rotary_factor": 2}}}, "a number > 0 and ≤ 1, not 2"),
        ({"text_config": {"per_layer_config": {"3": {"head_dim": 0}}}}, "per_layer_config.3.head_dim must be a number"),
        ({"text_config": None}, "text_config is null; download config.json again"),
        ({"image_token_id": -1}, "image_token_id must be the id of a token, not -1"),
    ],
)
def test_a_number_that_no_model_has_is_refused(config: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(ModelFolderError, match=re.escape(problem)) as caught:
        check_config_numbers(FOLDER, config)
    assert str(caught.value).startswith("folder/config.json: ")
    assert str(caught.value).endswith("; download config.json again")


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": {"num_local_experts": 0, "pad_token_id": -1, "sliding_window": -1, "rope_theta": 1e9}},
        {"vision_config": "a string", "max_pixels": 1 << 30, "hidden_size": None, "dropout": True},
        {"quantization_config": {"group_size": -1, "num_bits": -1}},
        {"vision_feature_layer": -2, "vision_config": {"num_hidden_layers": 2}},
    ],
)
def test_other_numbers_are_left_to_those_who_use_them(config: Mapping[str, Any]) -> None:
    check_config_numbers(FOLDER, config)


class _Processor:
    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)


@pytest.mark.parametrize("has_pixels", [False, True])
def test_sides_and_pixels_of_images_are_bounded(*, has_pixels: bool) -> None:
    size = SizeDict(shortest_edge=56 * 56, longest_edge=12_845_056)
    processor = _Processor(size=size if has_pixels else SizeDict(height=384, width=384), patch_size=14)
    check_processor_numbers(IMAGES, processor, most_patches=64, has_pixels=has_pixels)
    too_large = "longest_edge" if has_pixels else "height"
    processor = _Processor(size=SizeDict(**{too_large: 10**12 if has_pixels else 10**7}))
    with pytest.raises(ModelFolderError, match=f"^{IMAGES}: size.{too_large} of the image processor must be a number"):
        check_processor_numbers(IMAGES, processor, most_patches=64, has_pixels=has_pixels)


def test_the_family_bounds_the_patches() -> None:
    processor = _Processor(max_patches=96)
    check_processor_numbers(IMAGES, processor, most_patches=1 << 18, has_pixels=False)
    with pytest.raises(ModelFolderError, match="max_patches of the image processor must be a number from 1 to 64"):
        check_processor_numbers(IMAGES, processor, most_patches=64, has_pixels=False)
