"""Image files become the pixels of the model's own processor, and limits hold before anything is decoded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from prometheus_client import CollectorRegistry

from encoder_svc.images.preprocess import Preprocessor
from encoder_svc.images.quarantine import Quarantine, Stage
from encoder_svc.metrics import EncoderMetrics
from encoder_svc.vision.vision_model import VisionModel
from lookonce.content_key import ProcessorOptions, image_digest
from lookonce.errors import ImageTooLargeError
from lookonce.media.image_header import ImageLimits
from lookonce.process.process_clock import TimeLimits
from tests import image_files

LIMITS = ImageLimits(max_bytes=20 << 20, max_pixels=50_000_000, max_aspect=200.0)


def quarantine() -> Quarantine:
    """An empty quarantine for files."""
    return Quarantine(Stage.DECODE, EncoderMetrics(CollectorRegistry()))


@pytest.mark.parametrize("name", ["llava_clip", "llava_siglip", "qwen2_vl"])
async def test_prepared_pixels_equal_the_processors(name: str, vision_model: Callable[[str], VisionModel]) -> None:
    adapter = vision_model(name).adapter
    preprocessor = Preprocessor(adapter, LIMITS, 2, TimeLimits(60.0, 120.0), quarantine())
    image = image_files.noise(5, 120, 70)
    data = image_files.encoded(image)
    header = preprocessor.read_header(data, ProcessorOptions())
    inputs = await preprocessor.prepare(data, header, image_digest(data), ProcessorOptions())
    preprocessor.close()
    assert torch.equal(inputs.pixel_values, adapter.processor(images=image, return_tensors="pt")["pixel_values"])
    assert (header.width, header.height) == (120, 70)


async def test_limits_are_checked_before_anything_is_decoded(vision_model: Callable[[str], VisionModel]) -> None:
    preprocessor = Preprocessor(vision_model("llava_clip").adapter, LIMITS, 1, TimeLimits(60.0, 120.0), quarantine())
    data = image_files.png_of_size(40_000, 40_000)
    with pytest.raises(ImageTooLargeError):
        preprocessor.read_header(data, ProcessorOptions())
    preprocessor.close()
