"""Converts decoded pixels of every mode that an accepted file has to RGB with 8 bits per sample.

Pillow's own conversion cuts 16-bit grey at 255, which makes a picture white, and compares a transparent colour of the
file's bit depth with samples of 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import PIL.Image

from lookonce.errors import ImageUndecodableError

_WHITE = (255, 255, 255, 255)
_GREY_16 = "I;16"
# Modes with 8 bits per sample or fewer, which Pillow converts without loss of range.
_EIGHT_BIT_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "CMYK"})
# A PNG's transparent colour has the file's bit depth. Layout of the stored samples → the same colour with 8 bits.
_KEY_IN_8_BITS: dict[str, Callable[[Any], Any]] = {
    "L;2": lambda grey: grey * 85,
    "L;4": lambda grey: grey * 17,
    "RGB;16B": lambda colour: tuple(sample >> 8 for sample in colour),
}


def rgb_pixels(image: PIL.Image.Image, raw_mode: str | None) -> PIL.Image.Image:
    """Returns the pixels over a white background, as the models' processors do. Changes `image.info`.

    A sample of 16 bits becomes its upper 8 bits, in grey as in colour. `raw_mode` is Pillow's name for the layout of
    the samples in a PNG, None for other formats. Raises ImageUndecodableError for modes without a defined range.
    """
    if image.mode == _GREY_16:
        image = _grey_8(image)
    elif image.mode not in _EIGHT_BIT_MODES:
        raise ImageUndecodableError("the image's samples have no range that is accepted; save it with 8 or 16 bits")
    elif "transparency" in image.info and raw_mode in _KEY_IN_8_BITS:
        image.info["transparency"] = _KEY_IN_8_BITS[raw_mode](image.info["transparency"])
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        return PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, _WHITE), image).convert("RGB")
    return image.convert("RGB")


def _grey_8(image: PIL.Image.Image) -> PIL.Image.Image:
    """The upper bytes of 16-bit grey, with an alpha band if one grey is transparent."""
    # Mode I;16 is little-endian on every machine.
    grey = PIL.Image.frombytes("L", image.size, image.tobytes()[1::2])
    key = image.info.get("transparency")
    if key is None:
        return grey
    # All 16 bits decide what is transparent.
    table = [255] * (1 << 16)
    table[key] = 0
    return PIL.Image.merge("LA", (grey, image.convert("I").point(table, "L")))
