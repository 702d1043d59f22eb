"""Rotary positions of a prompt with images, by the scheme of its family. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence

from decoder_svc.request import Positions, Span

Grid = tuple[int, int, int]


def sequence_positions(num_tokens: int, first: int) -> Positions | None:
    """first, first + 1, …; None for 0, 1, …"""
    if first == 0:
        return None
    return Positions((tuple(range(first, first + num_tokens)),), delta=first)


def mrope_positions(num_tokens: int, images: Sequence[tuple[Span, Grid]]) -> Positions:
    """Time, height and width (arXiv:2409.12191, section 2.1): text advances all, an image spans its grid.

    `images` are in prompt order; an image's tokens are its grid's cells.
    """
    axes: tuple[list[int], list[int], list[int]] = ([], [], [])
    position = token = 0
    for span, grid in images:
        position = _append_text(axes, position, span.offset - token)
        position = _append_grid(axes, position, grid)
        token = span.stop
    position = _append_text(axes, position, num_tokens - token)
    return Positions(tuple(tuple(axis) for axis in axes), delta=position - num_tokens)


def _append_text(axes: tuple[list[int], ...], position: int, num_tokens: int) -> int:
    for axis in axes:
        axis.extend(range(position, position + num_tokens))
    return position + num_tokens


def _append_grid(axes: tuple[list[int], ...], position: int, grid: Grid) -> int:
    frames, height, width = grid
    for frame in range(frames):
        for row in range(height):
            for column in range(width):
                axes[0].append(position + frame)
                axes[1].append(position + row)
                axes[2].append(position + column)
    return position + max(grid)
