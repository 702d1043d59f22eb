"""Kimi K2.5 (`kimi_k25`, arXiv:2602.02276): one row per two by two patches, and latent attention."""

from __future__ import annotations

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing

# Patches of a side of the largest image; published folders have 512.
_MOST_SIDE = 1 << 14


def _sizing(source: FamilySource) -> ImageSizing:
    from transformers.models.kimi_k25.image_processing_kimi_k25 import navit_resize

    processor = source.processor
    merge, patch, most_side = processor.merge_size, processor.patch_size, processor.size.max_height

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        _, (padded_height, padded_width) = navit_resize(
            height, width, patch, merge, processor.max_patches, max_size_per_side=most_side
        )
        side = patch * merge
        return ImageShape((padded_height // side * (padded_width // side),))

    return ImageSizing(shape, ImageShape((_most_rows(processor.max_patches, most_side, merge),)))


def _most_rows(max_patches: int, most_side: int, merge: int) -> int:
    """Returns a bound of an image's rows.

    The processor resizes an image to `max_patches`, of which it counts whole ones alone before resizing, and to
    `most_side` patches a side. A side of `a` patches afterwards counts as more than `a - 1`. Both are then padded to
    whole rows.
    """

    def columns(lines: int) -> int:
        # Fewer than the patches of a side that becomes so many lines, and counted.
        least = (lines - 1) * merge - 1
        widest = most_side if least < 1 else min(most_side, 1 + max_patches // least)
        return -(-widest // merge)

    return max(lines * columns(lines) for lines in range(1, -(-most_side // merge) + 1))


def _refusal(source: FamilySource) -> str | None:
    processor, vision = source.processor, source.config.vision_config
    if not processor.do_resize:
        return "an image processor that does not resize is not supported"
    if not 1 <= processor.size.max_height <= _MOST_SIDE:
        return f"its image processor has images of {processor.size.max_height} patches a side; {_MOST_SIDE} are served"
    merge = processor.merge_size
    if (processor.patch_size, [merge, merge]) != (vision.patch_size, list(vision.merge_kernel_size)):
        return (
            f"its image processor has a patch_size of {processor.patch_size} and a merge_size of {merge}, but its "
            f"vision tower has patches of {vision.patch_size} pixels and merges {list(vision.merge_kernel_size)}"
        )
    return None


FAMILY = Family(
    title="Kimi K2.5",
    model_type="kimi_k25",
    architecture="Kimi_K25ForConditionalGeneration",
    sizing=_sizing,
    inputs=("pixel_values", "image_grid_thw"),
    # Patches of 14 px; published folders have 16,384.
    most_patches=1 << 18,
    needs_torchvision=True,
    refusal=_refusal,
)
