"""MiniCPM-V 4.6: the whole image, then its slices line by line, with sizes of their own; images are numbered.

The language model is Qwen3.5's. Patches of all slices and images lie side by side in one tensor (arXiv:2307.06304).
"""

from __future__ import annotations

import math

from lookonce.content_key import ProcessorOptions
from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing, SliceGrid

# Sides of the squares of patches that become a row: the tower merges two by two patches, and the merger does it again,
# alone in the finer mode.
_MERGED = {"16x": 4, "4x": 2}


def sliced_sizing(source: FamilySource) -> ImageSizing:
    """Returns the sizing of the image processor that MiniCPM-V 4.6 and 4.7 share."""
    processor = source.processor
    side = processor.patch_size * _MERGED[processor.downsample_mode]
    resized = {
        "scale_resolution": processor.scale_resolution,
        "patch_size": processor.patch_size,
        "downsample_mode": processor.downsample_mode,
    }

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        # The processor refuses no size, but gives an elongated image thousands of rows: 3,571 for 200,000 × 1 pixels.
        if max(width, height) > sizing.MAX_ASPECT * min(width, height):
            raise ValueError("too elongated")
        size = height, width
        grid = None
        if processor.slice_mode:
            grid = processor.get_sliced_grid(size, processor.max_slice_nums, processor.scale_resolution)
        whole_height, whole_width = processor.find_best_resize(size, allow_upscale=grid is None, **resized)
        whole = whole_height // side, whole_width // side
        if grid is None:
            return _shape(source, whole)
        lines, columns = grid
        all_height, all_width = processor.get_refine_size(size, grid, allow_upscale=True, **resized)
        slices = SliceGrid(lines, columns, all_height // lines // side, all_width // columns // side)
        return _shape(source, whole, slices)

    # An upper bound: the whole image and every slice are resized to at most this many pixels before rounding.
    most_pixels = processor.scale_resolution**2
    longest = math.isqrt(most_pixels * sizing.MAX_ASPECT) + 1
    shortest = most_pixels // longest
    most = max(_num_units(one, side) * _num_units(most_pixels // one, side) for one in range(shortest, longest + 1))
    num_slices = processor.max_slice_nums if processor.slice_mode and processor.max_slice_nums > 1 else 0
    return ImageSizing(shape, _shape(source, (1, most), SliceGrid(1, num_slices, 1, most) if num_slices else None))


def _num_units(length: int, unit: int) -> int:
    """Returns the number of units of a side after rounding, as in the image processor."""
    return max(round(length / unit), 1)


def _shape(source: FamilySource, whole: tuple[int, int], slices: SliceGrid | None = None) -> ImageShape:
    """Returns the expansion of an image, whose whole view has `whole` rows: from top to bottom, from left to right."""
    tokens = source.tokens
    start, end = tokens["slice_start_token"], tokens["slice_end_token"]
    parts: list[str | int] = [tokens["image_start_token"], whole[0] * whole[1]]
    before = tokens["image_end_token"]
    for number in range(slices.lines * slices.columns if slices else 0):
        assert slices is not None
        line_break = "\n" if number and number % slices.columns == 0 else ""
        parts += [f"{before}{line_break}{start}", slices.height * slices.width]
        before = end
    return ImageShape((*parts, before), (1, *whole), slices=slices)


def _opening(source: FamilySource, number: int) -> str:
    """Returns the number of an image between its markers, for folders that number images."""
    start, end = source.tokens["image_id_start_token"], source.tokens["image_id_end_token"]
    return f"{start}{number}{end}" if source.processor.use_image_id else ""


def _refusal(source: FamilySource) -> str | None:
    processor, config = source.processor, source.config
    if not processor.do_resize:
        return "MiniCPM-V 4.6 without resizing of images (do_resize) is not supported"
    if processor.downsample_mode != config.downsample_mode:
        return (
            f"its image processor counts rows for downsample_mode {processor.downsample_mode!r}, and its model "
            f"computes them for {config.downsample_mode!r}"
        )
    num_layers = config.vision_config.num_hidden_layers
    if config.downsample_mode == "16x" and not 0 <= config.insert_layer_id < num_layers:
        return f"its merger follows layer {config.insert_layer_id} (insert_layer_id) of a tower of {num_layers} layers"
    return None


FAMILY = Family(
    title="MiniCPM-V 4.6",
    model_type="minicpmv4_6",
    architecture="MiniCPMV4_6ForConditionalGeneration",
    sizing=sliced_sizing,
    inputs=("pixel_values", "target_sizes"),
    packed_inputs=frozenset({"pixel_values"}),
    opening=_opening,
    refusal=_refusal,
)
