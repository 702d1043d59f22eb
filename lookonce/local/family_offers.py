"""The features of a model family for images and videos, as `lookonce models` lists them."""

from __future__ import annotations

from lookonce.families.base import Family, Mask, PositionAxes

# Whether the tokens of an image may be computed in several steps.
_CHUNKING = {Mask.CAUSAL: "chunked", Mask.IMAGE: "whole image in a step", Mask.PROMPT: "whole prompt in a step"}


def offers_of(family: Family) -> list[str]:
    """Returns the features of a family for images and videos."""
    offers = [_CHUNKING[family.mask]]
    if family.has_max_pixels:
        offers.append("max_pixels")
    if family.axes in (PositionAxes.MROPE, PositionAxes.CANVAS):
        offers.append("M-RoPE")
    if family.axes is PositionAxes.XDROPE:
        offers.append("XD-RoPE")
    if family.has_levels:
        offers.append("feature levels")
    if family.depends_on_image_count:
        offers.append("no tiles beside others")
    if family.video is not None:
        offers.append("videos")
    return offers
