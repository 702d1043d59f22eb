"""Draws the demo pictures: one to three coloured shapes on a light background, deterministic by seed.

questions.py asks questions about them; the saved image processor resizes them for the model.
"""

from __future__ import annotations

import io
import math
import random
from dataclasses import dataclass
from typing import Final, TypeAlias

from PIL import Image, ImageDraw

Rgb: TypeAlias = tuple[int, int, int]

COLOURS: Final[dict[str, Rgb]] = {
    "red": (214, 30, 36),
    "green": (32, 150, 54),
    "blue": (32, 72, 214),
    "yellow": (244, 214, 24),
    "orange": (248, 134, 14),
    "purple": (128, 40, 160),
    "pink": (248, 132, 188),
    "black": (26, 26, 26),
}
SCENE_GRID_SIDE: Final = 3
SHAPES: Final = ("circle", "square", "triangle", "star", "cross", "diamond")
ROW_NAMES: Final = ("top", "middle", "bottom")
COLUMN_NAMES: Final = ("left", "middle", "right")

NUM_TRAINING_SEEDS: Final = 10_000_000
"""Training draws only scenes with seeds below this number; tests and reports use seeds from here on."""

_BACKGROUNDS: Final[tuple[Rgb, ...]] = (
    (255, 255, 255),
    (236, 236, 236),
    (252, 246, 228),
    (226, 238, 250),
    (230, 246, 232),
    (248, 232, 240),
)
_SIZES_PX: Final = ((224, 224), (224, 224), (256, 256), (320, 240), (240, 320), (300, 200), (160, 160))
_COLOUR_JITTER: Final = 12
_BACKGROUND_JITTER: Final = 5
_ROTATION_JITTER_DEG: Final = 10.0
_SUPERSAMPLING: Final = 2


@dataclass(frozen=True, slots=True)
class PlacedShape:
    """One shape inside one cell of the 3 by 3 grid."""

    shape: str
    colour: str
    column: int
    """Column of the grid cell; 0 is left."""
    row: int
    """Row of the grid cell; 0 is top."""
    center_x: float
    """Fraction of the picture's width."""
    center_y: float
    """Fraction of the picture's height."""
    radius: float
    """Fraction of the smaller side of a grid cell."""
    rotation_deg: float
    rgb: Rgb

    @property
    def name(self) -> str:
        """Colour and shape, for example "red circle"."""
        return f"{self.colour} {self.shape}"

    @property
    def position(self) -> str:
        """Name of the grid cell, for example "top left", "top middle" or "centre"."""
        return position_name(self.row, self.column)


@dataclass(frozen=True, slots=True)
class Scene:
    """The content of one picture, with its shapes in reading order."""

    width_px: int
    height_px: int
    background: Rgb
    shapes: tuple[PlacedShape, ...]


def position_name(row: int, column: int) -> str:
    """Names a grid cell: "top left" to "bottom right", and "centre" for the cell in the middle."""
    if (row, column) == (1, 1):
        return "centre"
    return f"{ROW_NAMES[row]} {COLUMN_NAMES[column]}"


def random_scene(seed: int, num_shapes: int | None = None, size_px: tuple[int, int] | None = None) -> Scene:
    """Returns the scene of a seed. `num_shapes` (1 to 3) and `size_px` (width, height) are random unless given."""
    rng = random.Random(seed)
    width_px, height_px = size_px or rng.choice(_SIZES_PX)
    count = num_shapes or rng.choices((1, 2, 3), weights=(2, 3, 4))[0]
    names = _random_names(rng, count)
    cells = sorted(rng.sample(range(SCENE_GRID_SIDE * SCENE_GRID_SIDE), count))
    shapes = [
        _place(rng, shape, colour, divmod(cell, SCENE_GRID_SIDE), width_px, height_px)
        for (shape, colour), cell in zip(names, cells, strict=True)
    ]
    background = _jitter(rng, rng.choice(_BACKGROUNDS), _BACKGROUND_JITTER)
    return Scene(width_px, height_px, background, tuple(shapes))


def render(scene: Scene) -> Image.Image:
    """Draws the scene as an anti-aliased RGB picture of `width_px` by `height_px` pixels."""
    width, height = scene.width_px * _SUPERSAMPLING, scene.height_px * _SUPERSAMPLING
    canvas = Image.new("RGB", (width, height), scene.background)
    draw = ImageDraw.Draw(canvas)
    radius_unit = min(width, height) / SCENE_GRID_SIDE
    for placed in scene.shapes:
        x, y, radius = placed.center_x * width, placed.center_y * height, placed.radius * radius_unit
        if placed.shape == "circle":
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=placed.rgb)
        else:
            draw.polygon(_outline(placed.shape, x, y, radius, placed.rotation_deg), fill=placed.rgb)
    return canvas.reduce(_SUPERSAMPLING)


def png_bytes(scene: Scene) -> bytes:
    """Returns the rendered scene as a PNG file."""
    buffer = io.BytesIO()
    render(scene).save(buffer, format="PNG")
    return buffer.getvalue()


def _random_names(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Returns (shape, colour) of each shape. Repeats are likelier than by chance, for questions that count."""
    names: list[tuple[str, str]] = []
    for _ in range(count):
        shape, colour = rng.choice(SHAPES), rng.choice(tuple(COLOURS))
        if names and rng.random() < 0.25:
            shape = rng.choice(names)[0]
        if names and rng.random() < 0.25:
            colour = rng.choice(names)[1]
        names.append((shape, colour))
    return names


def _place(
    rng: random.Random, shape: str, colour: str, cell: tuple[int, int], width_px: int, height_px: int
) -> PlacedShape:
    row, column = cell
    radius = rng.uniform(0.30, 0.46)
    smaller_side_px = min(width_px, height_px)
    # The shape stays inside its cell, so shapes never touch and every position has one name.
    slack_x = 0.48 - radius * smaller_side_px / width_px
    slack_y = 0.48 - radius * smaller_side_px / height_px
    return PlacedShape(
        shape=shape,
        colour=colour,
        column=column,
        row=row,
        center_x=(column + 0.5 + rng.uniform(-slack_x, slack_x)) / SCENE_GRID_SIDE,
        center_y=(row + 0.5 + rng.uniform(-slack_y, slack_y)) / SCENE_GRID_SIDE,
        radius=radius,
        rotation_deg=rng.uniform(-_ROTATION_JITTER_DEG, _ROTATION_JITTER_DEG),
        rgb=_jitter(rng, COLOURS[colour], _COLOUR_JITTER),
    )


def _jitter(rng: random.Random, rgb: Rgb, amount: int) -> Rgb:
    red, green, blue = (min(255, max(0, channel + rng.randint(-amount, amount))) for channel in rgb)
    return red, green, blue


def _outline(shape: str, x: float, y: float, radius: float, rotation_deg: float) -> list[tuple[float, float]]:
    """Returns the corner points, in pixels, of a shape in the square of half-side `radius` around (x, y)."""
    turn = math.radians(rotation_deg)
    cos_turn, sin_turn = math.cos(turn), math.sin(turn)
    return [
        (x + radius * (u * cos_turn - v * sin_turn), y + radius * (u * sin_turn + v * cos_turn))
        for u, v in _UNIT_OUTLINES[shape]
    ]


def _star_outline() -> list[tuple[float, float]]:
    points = []
    for corner in range(10):
        length = 1.0 if corner % 2 == 0 else 0.42
        angle = math.radians(-90 + 36 * corner)
        points.append((length * math.cos(angle), length * math.sin(angle)))
    return points


def _cross_outline(arm: float = 0.32) -> list[tuple[float, float]]:
    end = 0.95
    quarter = [(arm, -end), (arm, -arm), (end, -arm)]
    points = []
    for _ in range(4):
        points += quarter
        quarter = [(-v, u) for u, v in quarter]
    return points


_UNIT_OUTLINES: Final[dict[str, list[tuple[float, float]]]] = {
    "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
    "triangle": [(0.0, -1.0), (0.88, 0.72), (-0.88, 0.72)],
    "star": _star_outline(),
    "cross": _cross_outline(),
    "diamond": [(0.0, -1.0), (0.68, 0.0), (0.0, 1.0), (-0.68, 0.0)],
}
