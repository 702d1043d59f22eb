"""SmolVLM (arXiv:2504.05299): Idefics3's layout with smaller models, and videos of frames without tiles.

The text before a video states the number of its frames in words, and its duration.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lookonce.families import idefics3
from lookonce.families.base import FamilySource, FrameRule, FrameSizing
from lookonce.families.single_frames import fixed_size, timestamp

# Size in transformers if a folder states none.
_DEFAULT_SIZE = {"longest_edge": 4 * 364}
_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()


def in_words(number: int) -> str:
    """Returns a number below a million in English words, such as "one hundred and twenty-eight"."""
    if number >= 1000:
        thousands, rest = divmod(number, 1000)
        joint = " and " if rest < 100 else ", "
        return f"{in_words(thousands)} thousand" + (joint + in_words(rest) if rest else "")
    if number >= 100:
        hundreds, rest = divmod(number, 100)
        return f"{_SMALL[hundreds]} hundred" + (f" and {in_words(rest)}" if rest else "")
    if number >= len(_SMALL):
        tens, rest = divmod(number, 10)
        return _TENS[tens] + (f"-{_SMALL[rest]}" if rest else "")
    return _SMALL[number]


def _frame_sizing(source: FamilySource, settings: Mapping[str, Any]) -> FrameSizing:
    side = settings["max_image_size"]["longest_edge"]
    return fixed_size(
        {"size": {"height": side, "width": side}},
        source.config.vision_config.image_size,
        idefics3.rows_per_tile(source.config),
    )


def _arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of frames: resized to their longest edge, then made squares."""
    # Older folders have the size of frames beside the rate of sampling, and may have both.
    size = settings.get("size") or settings.get("video_sampling", {}).get("video_size") or _DEFAULT_SIZE
    return {"size": size, "max_image_size": settings["max_image_size"], "do_image_splitting": False}


def _texts(_source: FamilySource, index: int, num_frames: int, fps: float) -> tuple[str, str]:
    duration = datetime.timedelta(seconds=int(num_frames / fps))
    intro = (
        f"You are provided the following series of {in_words(num_frames)} frames from a {duration} [H:MM:SS] video.\n"
    )
    before = f"\nFrame from {timestamp(index, fps)}:{idefics3.MARKER}{idefics3.WHOLE}"
    after = idefics3.MARKER + ("\n\n" if index == num_frames - 1 else "")
    return ("" if index else intro) + before, after


VIDEO = FrameRule(
    defaults={
        "max_image_size": {"longest_edge": 364},
        "resample": 1,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    sizing=_frame_sizing,
    arguments=_arguments,
    placeholder=lambda source: source.tokens.get("video_token", "<video>"),
    texts=_texts,
)

FAMILY = replace(
    idefics3.FAMILY,
    title="SmolVLM",
    model_type="smolvlm",
    architecture="SmolVLMForConditionalGeneration",
    video=VIDEO,
)
