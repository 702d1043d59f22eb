"""LFM2-VL (arXiv:2511.23404): small images whole, large ones as named tiles and a thumbnail, between markers."""

from __future__ import annotations

from lookonce.content_key import ProcessorOptions
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing

# Names of markers, and their texts where the tokenizer does not name them.
_MARKERS = {
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}


def _sizing(source: FamilySource) -> ImageSizing:
    processor = source.processor
    begin, end, thumbnail = (source.tokens.get(name, text) for name, text in _MARKERS.items())
    has_markers = source.settings.get("use_image_special_tokens", True)
    row_pixels = processor.encoder_patch_size * processor.downsample_factor
    rows_per_tile = (processor.tile_size // row_pixels) ** 2
    most_rows = processor.max_num_patches // processor.downsample_factor**2
    splits = processor.do_image_splitting and not processor.min_tiles == processor.max_tiles == 1

    def shape_of(lines: int, columns: int, num_rows: int) -> ImageShape:
        parts: list[str | int] = [begin]
        if lines * columns > 1:
            for line in range(1, lines + 1):
                for column in range(1, columns + 1):
                    parts += [f"<|img_row_{line}_col_{column}|>", rows_per_tile]
            if processor.use_thumbnail:
                parts += [thumbnail, num_rows]
        else:
            parts.append(num_rows)
        parts.append(end)
        return ImageShape(tuple(part for part in parts if has_markers or isinstance(part, int)))

    def shape(width: int, height: int, options: ProcessorOptions) -> ImageShape:
        resized_width, resized_height = processor.smart_resize(
            height,
            width,
            processor.downsample_factor,
            processor.min_image_tokens,
            processor.max_image_tokens,
            processor.encoder_patch_size,
        )
        num_rows = resized_width // row_pixels * (resized_height // row_pixels)
        columns = lines = 1
        if splits and processor._is_image_too_large(
            height,
            width,
            processor.max_image_tokens,
            processor.encoder_patch_size,
            processor.downsample_factor,
            processor.max_pixels_tolerance,
        ):
            columns, lines, *_ = processor._get_grid_layout(
                height, width, processor.min_tiles, processor.max_tiles, processor.tile_size
            )
            if lines * columns == 1:
                raise ValueError("a single tile has other rows than the processor writes for it")
        is_whole_shown = lines * columns == 1 or processor.use_thumbnail
        if is_whole_shown and num_rows > most_rows:
            raise ValueError("the image is so elongated that it has more patches than the tower takes")
        return shape_of(lines, columns, num_rows)

    # The most tiles are `max_tiles` in one line: every line has the same number.
    largest = shape_of(1, processor.max_tiles, most_rows) if splits else shape_of(1, 1, most_rows)
    return ImageSizing(shape, max(largest, shape_of(1, 1, most_rows), key=lambda one: one.num_rows))


def _refusal(source: FamilySource) -> str | None:
    processor, factor = source.processor, source.config.downsample_factor
    if processor.downsample_factor != factor or processor.tile_size % (processor.encoder_patch_size * factor):
        return (
            f"its image processor has tiles of {processor.tile_size} pixels, patches of "
            f"{processor.encoder_patch_size} and a downsample_factor of {processor.downsample_factor}, which do not "
            f"fit the model's downsample_factor of {factor}"
        )
    return None if processor.do_pad else "its image processor does not pad (do_pad), which the model needs"


FAMILY = Family(
    title="LFM2-VL",
    model_type="lfm2_vl",
    architecture="Lfm2VlForConditionalGeneration",
    sizing=_sizing,
    inputs=("pixel_values", "spatial_shapes", "pixel_attention_mask"),
    needs_torchvision=True,
    refusal=_refusal,
)
