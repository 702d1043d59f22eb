"""Video-LLaVA's image processor guesses the layout of an image; ours is told."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from encoder_svc.images.image_inputs import VisionAdapter
from lookonce.content_key import ProcessorOptions
from lookonce.model.model_folder import ModelFolder
from tests import tiny_models


@pytest.mark.parametrize("size", [(50, 1), (50, 3), (3, 50), (3, 3), (80, 60)])
def test_pixels_of_low_images_are_those_of_clips_processor(
    size: tuple[int, int], family_folder: Callable[[str], pathlib.Path]
) -> None:
    adapter = VisionAdapter.load(ModelFolder.open(family_folder("video_llava")))
    image = tiny_models.random_image(0, *size)
    clip = CLIPImageProcessorPil(size=adapter.processor.size, crop_size=adapter.processor.crop_size)
    expected = clip(images=[image], return_tensors="pt")["pixel_values"]
    assert torch.equal(adapter.pixel_inputs(image, ProcessorOptions()).pixel_values, expected)
