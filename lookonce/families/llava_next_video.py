"""LLaVA-NeXT-Video: LLaVA-NeXT trained on videos as well; only its images are served, not its videos.

https://llava-vl.github.io/blog/2024-04-30-llava-next-video. It pools single frames, and `VideoRule` needs pairs.
"""

from __future__ import annotations

from dataclasses import replace

from lookonce.families import llava_next

FAMILY = replace(
    llava_next.FAMILY,
    title="LLaVA-NeXT-Video",
    model_type="llava_next_video",
    architecture="LlavaNextVideoForConditionalGeneration",
)
