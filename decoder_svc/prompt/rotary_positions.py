"""Rotary positions of a prompt with images, by the scheme of its model family. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decoder_svc.scheduling.prompt import Positions, Span
from lookonce.families.base import FramePlace

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class PlacedGrid:
    """The span of an image or frame pair, with one token per cell of its grid."""

    span: Span
    # Frames, height, width.
    grid: Grid
    # Index and time of a frame pair in its video; None for an image.
    place: FramePlace | None = None


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
