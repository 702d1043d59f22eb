"""Drawn pictures are PNG files of the size that was asked for, and no two are equal."""

from __future__ import annotations

import io
import random

import PIL.Image
import pytest

from lookonce.commands.bench.drawing import draw_picture


@pytest.mark.parametrize("size_px", [8, 9, 100])
def test_a_picture_is_a_png_of_this_size(size_px: int) -> None:
    with PIL.Image.open(io.BytesIO(draw_picture(random.Random(1), size_px))) as picture:
        picture.load()
        assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", (size_px, size_px))
        assert len(picture.getcolors() or ()) == 64


def test_pictures_differ_and_a_seed_repeats_them() -> None:
    numbers, same = random.Random(2), random.Random(2)
    drawn = [draw_picture(numbers, 16) for _ in range(20)]
    assert len(set(drawn)) == 20
    assert [draw_picture(same, 16) for _ in range(20)] == drawn
