"""Rotary positions of a prompt with images, by the scheme of its model family. Plain Python."""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass

from decoder_svc.scheduling.prompt import Positions, Span
from lookonce.families.base import FramePlace, SliceGrid

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class PlacedGrid:
    """The span of an image or frame pair, with one token per cell of its grid."""

    span: Span
    # Frames, height, width.
    grid: Grid
    # Index and time of a frame pair in its video; None for an image.
    place: FramePlace | None = None
    # The slices behind the grid, in families with a canvas; None: there are none.
    slices: SliceGrid | None = None


def sequence_positions(num_tokens: int, first: int) -> Positions | None:
    """Returns the positions first, first + 1, …; None for 0, 1, …"""
    if first == 0:
        return None
    return Positions((tuple(range(first, first + num_tokens)),), delta=first)


def mrope_positions(num_tokens: int, images: Sequence[PlacedGrid]) -> Positions:
    """Returns M-RoPE positions: axes for time, height and width (arXiv:2409.12191, section 2.1).

    Text advances all three axes; an image spans its grid. All frame pairs of a video start at the same height and
    width, each at its own time. The token after a video follows its largest position. `images` are in prompt order.
    """
    axes: tuple[list[int], list[int], list[int]] = ([], [], [])
    # `position` is the next token's position, `start` that of the current image or video, `token` an index.
    position = start = token = 0
    for image in images:
        position = _append_text(axes, position, image.span.offset - token)
        if image.place is None or image.place.index == 0:
            start = position
        time = 0 if image.place is None else image.place.time
        _append_grid(axes, start, time, image.grid)
        position = max(position, start + max(time + image.grid[0], *image.grid[1:]))
        token = image.span.stop
    position = _append_text(axes, position, num_tokens - token)
    return Positions(tuple(tuple(axis) for axis in axes), delta=position - num_tokens)


def xdrope_positions(num_tokens: int, images: Sequence[PlacedGrid]) -> Positions:
    """Returns XD-RoPE positions: axes for the place in the prompt, column, line and number of the image.

    An image's first and last row are markers with the positions of text (arXiv:2511.19575). `images` are in prompt
    order.
    """
    axes = tuple(list(range(num_tokens)) for _ in range(4))
    for number, image in enumerate(images):
        _, height, width = image.grid
        start = image.span.offset + (image.span.length - height * width) // 2
        for cell in range(height * width):
            axes[1][start + cell] = cell % width
            axes[2][start + cell] = cell // width
            axes[3][start + cell] = number
    return Positions(tuple(tuple(axis) for axis in axes), delta=0)


def canvas_positions(token_ids: Sequence[int], images: Sequence[PlacedGrid], markers: Container[int]) -> Positions:
    """Returns positions on canvases (MiniCPM-V 4.7): axes for time, height and width.

    The rows of an image's slices fill a canvas, and those of the whole image are stretched over it. All have the time
    of the canvas's origin. Markers lie at the corners of what they enclose, and those behind an image at the origin.
    Text advances all axes; behind a canvas, it goes on one step beyond its longer side. `images` are in prompt order;
    in front of each of them, and between its parts, is one marker per part.
    """
    axes: tuple[list[int], ...] = ([], [], [])
    position = token = 0
    for image in images:
        position = _append_text(axes, position, max(image.span.offset - 1 - token, 0))
        _, height, width = image.grid
        slices = image.slices
        canvas = (height, width) if slices is None else (slices.lines * slices.height, slices.columns * slices.width)
        token = image.span.stop
        while token < len(token_ids) and token_ids[token] in markers:
            token += 1
        _place_on_canvas(axes, position, canvas, image, token)
        position += max(canvas) + 1
    _append_text(axes, position, len(token_ids) - token)
    return Positions(tuple(map(tuple, axes)), delta=1 + max(map(max, axes)) - len(token_ids))


def _place_on_canvas(
    axes: tuple[list[int], ...], origin: int, canvas: tuple[int, int], image: PlacedGrid, stop: int
) -> None:
    """Appends the positions of an image from the marker in front of it up to token `stop`."""
    _, height, width = image.grid
    # (height, width) relative to the origin, of the tokens from that marker on.
    before = -1 if origin else 0
    places: list[tuple[int, int]] = [(before, before)]
    tops, lefts = (_stretched(side, over) for side, over in zip((height, width), canvas, strict=True))
    places += [(top, left) for top in tops for left in lefts]
    places.append(canvas)
    slices = image.slices
    for number in range(slices.lines * slices.columns if slices else 0):
        assert slices is not None
        line, column = divmod(number, slices.columns)
        top, left = line * slices.height, column * slices.width
        if number and column == 0:
            # The line break behind the slices of a line.
            places.append((top - 1, canvas[1]))
        places.append((top, left))
        places += [(top + row, left + place) for row in range(slices.height) for place in range(slices.width)]
        places.append((top + slices.height - 1, left + slices.width - 1))
    # The marker in front may have been the last one behind the image before.
    first = image.span.offset - 1
    for axis in axes:
        del axis[first:]
    num_tokens = stop - first
    places = [*places, *[(0, 0)] * num_tokens][:num_tokens]
    axes[0].extend([origin] * num_tokens)
    for axis, relative in zip(axes[1:], zip(*places, strict=True), strict=True):
        axis.extend(origin + one for one in relative)


def _stretched(number: int, over: int) -> list[int]:
    """Returns `number` places spread evenly over 0 to `over` - 1, rounded as torch.linspace in single precision."""
    if number == 1:
        return [0]
    step = _single((over - 1) / (number - 1))
    first_half = [_single(step * index) for index in range(number // 2)]
    others = [_single(over - 1 - _single(step * (number - 1 - index))) for index in range(number // 2, number)]
    return [round(place) for place in (*first_half, *others)]


def _single(value: float) -> float:
    return array("f", [value])[0]


def _append_text(axes: tuple[list[int], ...], position: int, num_tokens: int) -> int:
    for axis in axes:
        axis.extend(range(position, position + num_tokens))
    return position + num_tokens


def _append_grid(axes: tuple[list[int], ...], start: int, time: int, grid: Grid) -> None:
    frames, height, width = grid
    for frame in range(frames):
        for row in range(height):
            for column in range(width):
                axes[0].append(start + time + frame)
                axes[1].append(start + row)
                axes[2].append(start + column)
