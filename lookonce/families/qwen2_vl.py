"""Qwen2-VL (arXiv:2409.12191): images of any size, one row per merged patch, and M-RoPE."""

from __future__ import annotations

from typing import Any

from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageSizing, PairRule, PositionAxes
from lookonce.families.frame_pairs import PairSettings, even_share
from lookonce.image_file import FRAMES_PER_PAIR


def qwen_sizing(source: FamilySource) -> ImageSizing:
    """Returns the sizing of the image processor that all Qwen-VL models share."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    return sizing.patch_grid(source.processor, smart_resize)


def _frame_size(
    settings: PairSettings, width: int, height: int, num_frames: int, max_pixels: int | None
) -> tuple[int, int]:
    """Resizes a frame; the bounds apply to the pixels of each frame."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    most = settings.most_pixels
    if settings.has_frame_cap:
        budget = int(settings.max_video_tokens * settings.factor**2 * 0.9)
        most = even_share(settings, min(most, budget * FRAMES_PER_PAIR // num_frames))
    most = most if max_pixels is None else min(most, max_pixels)
    resized_height, resized_width = smart_resize(height, width, settings.factor, settings.least_pixels, most)
    return resized_height, resized_width


def _one_step(_config: Any, _seconds: float) -> float:
    return 1.0


VIDEO = PairRule(
    defaults={
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "max_video_tokens": 128_000,
    },
    frame_size=_frame_size,
    bounded_frames=lambda _num_frames: 1,
    time_steps=_one_step,
)

FAMILY = Family(
    title="Qwen2-VL",
    model_type="qwen2_vl",
    architecture="Qwen2VLForConditionalGeneration",
    sizing=qwen_sizing,
    inputs=("pixel_values", "image_grid_thw"),
    axes=PositionAxes.MROPE,
    has_max_pixels=True,
    processor_arguments=sizing.pixel_size,
    video=VIDEO,
)
