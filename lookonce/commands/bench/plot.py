"""Draws the latencies of a run as an SVG file. Needs no library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from lookonce.commands.bench.load import Measured

_WIDTH, _HEIGHT, _LEFT, _TOP = 430, 280, 60, 40
_NEW, _SEEN, _WHOLE, _FIRST = "#d1495b", "#00798c", "#30303a", "#edae49"
_LEGEND = (
    (_NEW, "with a new picture"),
    (_SEEN, "with pictures seen before"),
    (_WHOLE, "whole answers"),
    (_FIRST, "first texts"),
)
_NUM_TICKS = 5
_STYLE = "font-family: sans-serif; font-size: 12px; fill: #333"


@dataclass(frozen=True, slots=True)
class _Panel:
    """A coordinate system: where it begins on the page, and the largest values of its axes."""

    left: float
    max_x: float
    max_y: float

    def x(self, value: float) -> str:
        return f"{self.left + value / self.max_x * _WIDTH:.1f}"

    def y(self, value: float) -> str:
        return f"{_TOP + _HEIGHT - value / self.max_y * _HEIGHT:.1f}"

    def axes(self, title: str, x_title: str, y_title: str, y_text: Callable[[float], str]) -> str:
        """Returns the frame with its ticks and titles."""
        frame = f'<rect x="{self.left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>'
        parts = [frame, _text(self.left, _TOP - 12, title, weight="bold")]
        parts.append(_text(self.left + _WIDTH / 2, _TOP + _HEIGHT + 36, x_title, anchor="middle"))
        parts.append(_text(self.left - 6, _TOP - 16, y_title, anchor="end"))
        for tick in range(_NUM_TICKS + 1):
            x, y = self.max_x * tick / _NUM_TICKS, self.max_y * tick / _NUM_TICKS
            parts.append(_text(float(self.x(x)), _TOP + _HEIGHT + 18, f"{x:.3g}", anchor="middle"))
            if tick:
                parts.append(_text(self.left - 6, float(self.y(y)) + 4, y_text(y), anchor="end"))
        return "".join(parts)


def svg(measured: Sequence[Measured], title: str) -> str:
    """Returns an SVG file: the latency of each answer over the time of its start, and the shares of latencies."""
    answered = [one for one in measured if one.usage is not None]
    latencies = [one.latency_s for one in answered]
    first_texts = [one.first_text_s for one in answered if one.first_text_s is not None]
    longest_s = _round_up(max(latencies, default=1.0))
    by_time = _Panel(_LEFT, _round_up(max((one.start_s for one in measured), default=1.0)), longest_s)
    by_share = _Panel(_LEFT * 2 + _WIDTH + 20, longest_s, 1.0)
    dots = "".join(
        f'<circle cx="{by_time.x(one.start_s)}" cy="{by_time.y(one.latency_s)}" r="3" fill-opacity="0.7" '
        f'fill="{_NEW if one.is_new else _SEEN}"/>'
        for one in answered
    )
    width, height = by_share.left + _WIDTH + 20, _TOP + _HEIGHT + 80
    legend = "".join(
        f'<circle cx="{_LEFT + 8 + number * 230}" cy="{height - 16}" r="5" fill="{colour}"/>'
        + _text(_LEFT + 20 + number * 230, height - 12, name)
        for number, (colour, name) in enumerate(_LEGEND)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" style="{_STYLE}">'
        f'<rect width="100%" height="100%" fill="white"/><title>{escape(title)}</title>'
        + by_time.axes(title, "start, s", "s", "{:.3g}".format)
        + dots
        + by_share.axes("share of answers within a time", "time, s", "share", "{:.0%}".format)
        + _steps(by_share, latencies, _WHOLE)
        + _steps(by_share, first_texts, _FIRST)
        + legend
        + "</svg>\n"
    )


def _steps(panel: _Panel, values: Sequence[float], colour: str) -> str:
    """Returns the line of the share of values up to each time."""
    ordered = sorted(values)
    corners = [(0.0, 0.0)]
    for number, value in enumerate(ordered, 1):
        corners += [(value, corners[-1][1]), (value, number / len(ordered))]
    points = " ".join(f"{panel.x(x)},{panel.y(y)}" for x, y in corners)
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {place}>{escape(text)}</text>"


def _round_up(value: float) -> float:
    """Returns the next number of 1, 2 or 5 times a power of ten, for the end of an axis."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value)
