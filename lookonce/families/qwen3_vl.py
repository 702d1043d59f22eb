"""Qwen3-VL: Qwen2-VL's layout, with features of earlier tower layers added to the first layers' hidden states.

Those levels (deepstack, arXiv:2406.04334) are stored with each row in the same entry. Each pair of a video's frames is
preceded by its time as text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lookonce.families import qwen2_vl
from lookonce.families.base import PairRule
from lookonce.families.frame_pairs import PairSettings, even_share
from lookonce.image_file import FRAMES_PER_PAIR


def _num_levels(config: Any) -> int:
    return len(config.vision_config.deepstack_visual_indexes)


def _frame_size(
    settings: PairSettings, width: int, height: int, num_frames: int, max_pixels: int | None
) -> tuple[int, int]:
    """Resizes a frame; the bounds apply to the pixels of all frames together."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    most = settings.most_pixels
    if settings.has_frame_cap:
        cap = settings.max_video_tokens * settings.factor**2
        most = num_frames * even_share(settings, min(cap, most // num_frames))
    # The processor compares whole pairs with its bound and rounds half to even: 5 frames count as 4.
    counted = min(num_frames, round(num_frames / FRAMES_PER_PAIR) * FRAMES_PER_PAIR)
    most = most if max_pixels is None else min(most, max_pixels * counted)
    resized_height, resized_width = smart_resize(
        num_frames, height, width, FRAMES_PER_PAIR, settings.factor, settings.least_pixels, most
    )
    return resized_height, resized_width


def _placeholder(token: str) -> str:
    return f"<|vision_start|>{token}<|vision_end|>"


def _time_in_words(seconds: float) -> tuple[str, str]:
    return f"<{seconds:.1f} seconds><|vision_start|>", "<|vision_end|>"


VIDEO = PairRule(
    defaults={
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_video_tokens": 768,
    },
    frame_size=_frame_size,
    bounded_frames=lambda num_frames: num_frames,
    placeholder=_placeholder,
    surrounding_text=_time_in_words,
)

FAMILY = replace(
    qwen2_vl.FAMILY,
    title="Qwen3-VL",
    model_type="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    num_levels=_num_levels,
    video=VIDEO,
)
