"""GLM-4.1V (arXiv:2507.01006): one row per merged patch, M-RoPE; pixel bounds count a still image as two frames.

A pair of a video's frames looks like an image in the prompt, with the time of its first frame in whole seconds behind.
"""

from __future__ import annotations

from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageSizing, PairRule, PositionAxes
from lookonce.families.frame_pairs import PairSettings
from lookonce.image_file import FRAMES_PER_PAIR


def _sizing(source: FamilySource) -> ImageSizing:
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

    frames = _frames(source)

    def resized(height: int, width: int, *bounds: int) -> tuple[int, int]:
        resized_height, resized_width = smart_resize(frames, height, width, frames, *bounds)
        return resized_height, resized_width

    return sizing.patch_grid(source.processor, resized, frames)


def _frames(source: FamilySource) -> int:
    return int(source.processor.temporal_patch_size)


def _frame_size(
    settings: PairSettings, width: int, height: int, num_frames: int, max_pixels: int | None
) -> tuple[int, int]:
    """Resizes a frame; the bounds apply to the pixels of all frames together."""
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

    # The processor compares whole pairs with its bound and rounds half to even: 5 frames count as 4.
    counted = min(num_frames, round(num_frames / FRAMES_PER_PAIR) * FRAMES_PER_PAIR)
    caps = [cap * counted for cap in (settings.frame_cap, max_pixels) if cap is not None]
    most = min(settings.most_pixels, *caps)
    resized_height, resized_width = smart_resize(
        num_frames, height, width, FRAMES_PER_PAIR, settings.factor, settings.least_pixels, most
    )
    return resized_height, resized_width


def _whole_seconds(seconds: float) -> tuple[str, str]:
    return "<|begin_of_image|>", f"<|end_of_image|>{int(seconds)}"


VIDEO = PairRule(
    defaults={
        "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30_000},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "max_video_tokens": 0,
    },
    frame_size=_frame_size,
    bounded_frames=lambda num_frames: num_frames,
    surrounding_text=_whole_seconds,
    timed_frame=lambda first, _last: first,
    takes_image_token=True,
    # The bound of a whole video is 30,000 rows, which a pair of very large frames would take alone.
    frame_cap=lambda source: int(source.processor.size.longest_edge) // _frames(source),
)

FAMILY = Family(
    title="GLM-4.1V",
    model_type="glm4v",
    architecture="Glm4vForConditionalGeneration",
    sizing=_sizing,
    inputs=("pixel_values", "image_grid_thw"),
    axes=PositionAxes.MROPE,
    has_max_pixels=True,
    frames_per_image=_frames,
    processor_arguments=lambda source, options: sizing.pixel_size(source, options, _frames(source)),
    video=VIDEO,
)
