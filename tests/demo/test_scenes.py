"""Scenes are determined by their seed, positions are unambiguous, and shapes are drawn as described."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
from PIL import Image

from demo.scenes import COLOURS, SHAPES, png_bytes, position_name, random_scene, render

SEEDS = range(20_000_000, 20_000_200)


def test_same_seed_gives_the_same_scene_and_the_same_pixels() -> None:
    for seed in SEEDS[:20]:
        assert random_scene(seed) == random_scene(seed)
        assert png_bytes(random_scene(seed)) == png_bytes(random_scene(seed))


def test_different_seeds_give_different_scenes() -> None:
    assert len({random_scene(seed) for seed in SEEDS}) == len(SEEDS)


def test_every_shape_lies_inside_its_own_grid_cell() -> None:
    for seed in SEEDS:
        scene = random_scene(seed)
        cells = [(placed.row, placed.column) for placed in scene.shapes]
        assert len(set(cells)) == len(cells)
        for placed in scene.shapes:
            smaller_px = min(scene.width_px, scene.height_px)
            reach_x = placed.radius * smaller_px / 3 / scene.width_px
            reach_y = placed.radius * smaller_px / 3 / scene.height_px
            assert placed.column / 3 <= placed.center_x - reach_x
            assert placed.center_x + reach_x <= (placed.column + 1) / 3
            assert placed.row / 3 <= placed.center_y - reach_y
            assert placed.center_y + reach_y <= (placed.row + 1) / 3


def test_shapes_come_in_reading_order() -> None:
    for seed in SEEDS:
        cells = [(placed.row, placed.column) for placed in random_scene(seed).shapes]
        assert all(one < other for one, other in pairwise(cells))


def test_pixel_at_a_shapes_centre_has_the_shapes_colour_and_a_corner_has_the_background() -> None:
    for seed in SEEDS[:50]:
        scene = random_scene(seed)
        picture = render(scene)
        assert picture.size == (scene.width_px, scene.height_px)
        assert picture.mode == "RGB"
        for placed in scene.shapes:
            point = (int(placed.center_x * scene.width_px), int(placed.center_y * scene.height_px))
            assert picture.getpixel(point) == placed.rgb
        assert picture.getpixel((0, 0)) == scene.background


@pytest.mark.parametrize("num_shapes", [1, 2, 3])
def test_number_of_shapes_and_size_can_be_asked_for(num_shapes: int) -> None:
    scene = random_scene(20_000_000, num_shapes, size_px=(320, 240))
    assert len(scene.shapes) == num_shapes
    assert render(scene).size == (320, 240)


def test_all_colours_and_shapes_occur() -> None:
    placed = [shape for seed in SEEDS for shape in random_scene(seed).shapes]
    assert {shape.colour for shape in placed} == set(COLOURS)
    assert {shape.shape for shape in placed} == set(SHAPES)


def test_position_names_are_unique() -> None:
    names = {position_name(row, column) for row in range(3) for column in range(3)}
    assert len(names) == 9
    assert position_name(1, 1) == "centre"
    assert position_name(0, 2) == "top right"


def test_png_bytes_decode_to_the_rendered_picture() -> None:
    scene = random_scene(20_000_001)
    with Image.open(io.BytesIO(png_bytes(scene))) as picture:
        assert picture.format == "PNG"
        assert picture.tobytes() == render(scene).tobytes()
