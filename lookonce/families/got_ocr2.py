"""GOT-OCR 2.0 (arXiv:2409.01704): each page is one square, which SAM's tower and two convolutions reduce to rows."""

from __future__ import annotations

from lookonce.families import sizing
from lookonce.families.base import Family, FamilySource, ImageShape, ImageSizing


def _sizing(source: FamilySource) -> ImageSizing:
    # Each of the projector's two convolutions halves the sides and rounds up.
    side = -(-sizing.square_patches(source.config.vision_config) // 4)
    return sizing.constant(ImageShape((side * side,)))


FAMILY = Family(
    title="GOT-OCR 2.0",
    model_type="got_ocr2",
    architecture="GotOcr2ForConditionalGeneration",
    sizing=_sizing,
    # The models' own processor cuts a page into tiles only if its caller asks for it.
    processor_arguments=lambda _source, _options: {"crop_to_patches": False},
)
