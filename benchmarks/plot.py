"""Draws results as bar charts: `python -m benchmarks.plot` makes docs/plots/*.svg from benchmarks/results/*.json.

SVG is written by hand: a dozen rectangles need no library. Bars are medians, thin lines go from the least to the most.
"""

from __future__ import annotations

import json
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.report import JSON_FOLDER

FOLDER = pathlib.Path(__file__).parents[1] / "docs/plots"
_COLOURS = ("#2a6f97", "#a9d6e5", "#e07a5f", "#b5b5b5")
_WIDTH, _LABEL_WIDTH, _VALUE_WIDTH, _MARGIN = 780, 250, 90, 10
_BAR_HEIGHT, _GROUP_GAP, _HEAD_HEIGHT, _LEGEND_HEIGHT = 18, 12, 34, 26


@dataclass(frozen=True, slots=True)
class Chart:
    """Groups of bars, one per series in each."""

    title: str
    # Printed after every value, for example " req/s".
    unit: str
    series: tuple[str, ...]
    # Figures of all repeats by group and series; empty if not run.
    groups: Mapping[str, Sequence[Sequence[float]]]


def draw(chart: Chart) -> str:
    """Returns the chart as an SVG document."""
    most = max((max(values) for bars in chart.groups.values() for values in bars if values), default=1.0)
    scale = (_WIDTH - _LABEL_WIDTH - _VALUE_WIDTH) / most
    parts, top = [], _HEAD_HEIGHT
    for label, bars in chart.groups.items():
        middle = top + len(bars) * _BAR_HEIGHT / 2 + 4
        parts.append(f'<text x="{_LABEL_WIDTH - 10}" y="{middle:.1f}" text-anchor="end">{escape(label)}</text>')
        for index, values in enumerate(bars):
            parts += _bar(values, top + index * _BAR_HEIGHT, scale, _COLOURS[index % len(_COLOURS)], chart.unit)
        top += len(bars) * _BAR_HEIGHT + _GROUP_GAP
    parts += _legend(chart.series, top)
    height = top + _LEGEND_HEIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            f'<text x="{_MARGIN}" y="20" font-size="14" font-weight="bold">{escape(chart.title)}</text>',
            *parts,
            "</svg>\n",
        ]
    )


def _bar(values: Sequence[float], top: float, scale: float, colour: str, unit: str) -> list[str]:
    middle = top + _BAR_HEIGHT / 2
    if not values:
        return [f'<text x="{_LABEL_WIDTH + 4}" y="{middle + 4:.1f}" fill="#777">not run</text>']
    median = statistics.median(values)
    least, most = (_LABEL_WIDTH + value * scale for value in (min(values), max(values)))
    return [
        f'<rect class="bar" x="{_LABEL_WIDTH}" y="{top + 1:.1f}" width="{median * scale:.1f}" '
        f'height="{_BAR_HEIGHT - 2}" fill="{colour}"/>',
        f'<line x1="{least:.1f}" x2="{most:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" stroke="#333"/>',
        f'<text x="{most + 6:.1f}" y="{middle + 4:.1f}">{escape(f"{median:.3g}{unit}")}</text>',
    ]


def _legend(series: Sequence[str], top: float) -> list[str]:
    step = (_WIDTH - _MARGIN) / max(1, len(series))
    parts = []
    for index, name in enumerate(series):
        left = _MARGIN + index * step
        parts.append(
            f'<rect x="{left:.1f}" y="{top}" width="12" height="12" fill="{_COLOURS[index % len(_COLOURS)]}"/>'
            f'<text x="{left + 18:.1f}" y="{top + 11}">{escape(name)}</text>'
        )
    return parts


def prefix_reuse(figures: Mapping[str, Any]) -> Chart:
    """Requests per second, by workload."""
    return Chart(
        "prefix_reuse: requests per second, one replica",
        " req/s",
        ("prefix cache", "without", "vLLM, prefix cache"),
        {
            name: [_speeds(pairs, side, "on") for side in ("on", "off", "peer")]
            for name, pairs in figures["workloads"].items()
        },
    )


def two_replicas(figures: Mapping[str, Any]) -> Chart:
    """Requests per second, by workload."""
    return Chart(
        "two_replicas: requests per second on the same CPUs",
        " req/s",
        ("requests as the SDK places them", "requests in turns", "two vLLM engines, in turns"),
        {
            name: [_speeds(rounds, side, "ours") for side in ("placed", "ours", "peer")]
            for name, rounds in figures["workloads"].items()
        },
    )


def _speeds(rounds: Sequence[Mapping[str, Any]], side: str, asked: str) -> list[float]:
    """`asked` is the side that holds the number of requests."""
    return [one[asked]["num_requests"] / one[side]["duration_s"] for one in rounds if one.get(side)]


def overlap(figures: Mapping[str, Any]) -> Chart:
    """Milliseconds to the first token, by number of images."""
    return Chart(
        "overlap: time to the first token of a prompt with unseen images",
        " ms",
        ("encoding beside the prompt", "one after the other", "the prompt alone"),
        {
            f"{number} images": [
                [1000 * one[name] for one in rounds] for name in ("overlapped_s", "waiting_s", "prompt_s")
            ]
            for number, rounds in figures["images"].items()
        },
    )


def startup(figures: Mapping[str, Any]) -> Chart:
    """Seconds to the first token, by arrangement."""
    names = {"stack": "Redis, encoder, decoder", "decoder": "decoder alone", "peer": "vLLM"}
    return Chart(
        "startup: from process start to the first token",
        " s",
        ("seconds",),
        {
            label: [[one["first_token_s"] for one in figures["sides"].get(name, {"starts": []})["starts"]]]
            for name, label in names.items()
        },
    )


def image_light(figures: Mapping[str, Any]) -> Chart:
    """Requests per second of both arrangements."""
    num_requests = figures["load"]["num_requests"]
    return Chart(
        "image_light: one request in five has an image, none is seen twice",
        " req/s",
        ("decoder, encoder and Redis", "encoder in the decoder's process"),
        {
            f"{num_requests} requests": [
                [num_requests / one[side]["duration_s"] for one in figures["rounds"]] for side in ("split", "single")
            ]
        },
    )


def hit_cost(figures: Mapping[str, Any]) -> Chart:
    """Milliseconds to the first token, by what is asked."""
    names = {"text_s": "text of as many tokens", "image_s": "cached image", "cold_s": "unseen image"}
    return Chart(
        "hit_cost: time to the first token",
        " ms",
        ("milliseconds",),
        {label: [[1000 * pair[name] for pair in figures["pairs"]]] for name, label in names.items()},
    )


def decode_speed(figures: Mapping[str, Any]) -> Chart:
    """Speed relative to the peer by batch size; one series per element type and context length."""
    by_batch: dict[str, dict[str, list[float]]] = {}
    for cell in figures["beside_peer"]:
        ratios = [theirs / ours for theirs, ours in zip(cell["peers_s"], cell["ours_s"], strict=True)]
        by_batch.setdefault(f"batch {cell['batch']}", {})[f"{cell['dtype']}, {cell['context']} tokens"] = ratios
    series = tuple(next(iter(by_batch.values()), ()))
    return Chart(
        "decode_speed: vLLM's time between tokens over ours",
        " ×",
        series,
        {batch: [cells[name] for name in series] for batch, cells in by_batch.items()},
    )


def encode_speed(figures: Mapping[str, Any]) -> Chart:
    """Images per second of every side, by element type and batch."""
    sides = {"lookonce": "ours", "transformers": "transformers", "vllm": "vLLM"}
    cells = [cell for name, one in figures.items() if name != "machine" for cell in one["cells"]]
    return Chart(
        "encode_speed: images per second through the tower",
        " images/s",
        tuple(sides.values()),
        {
            f"{cell['dtype']}, {cell['batch']} at a time": [
                [cell["num_images"] / seconds for seconds in cell["seconds"].get(side, [])] for side in sides
            ]
            for cell in cells
        },
    )


def edge_cost(figures: Mapping[str, Any]) -> Chart:
    """Tokens per second of the service over those of the engine alone, by model, threads and streams."""
    groups: dict[str, list[list[float]]] = {}
    for cell in figures["cells"]:
        name = f"{cell['model']}, {cell['num_threads']} of 2 CPUs, {cell['num_streams']} streams"
        ratios = [pair["bare"]["duration_s"] / pair["service"]["duration_s"] for pair in cell["pairs"]]
        groups.setdefault(name, []).append(ratios)
    return Chart(
        "edge_cost: tokens per second of the service over those of the engine alone",
        "",
        ("engine in a thread", "engine in a process"),
        groups,
    )


def overload(figures: Mapping[str, Any]) -> Chart:
    """Answers in time per second, by load and place of the engine."""
    engines = figures["engines"]
    shares = next(iter(engines.values()))["open_loop"]
    return Chart(
        "overload: answers in time per second, by load over what saturates",
        " /s",
        tuple(f"engine in a {engine}" for engine in engines),
        {
            f"{float(share):g} × saturation": [
                [phase["goodput"] for phase in found["open_loop"][share]] for found in engines.values()
            ]
            for share in shares
        },
    )


def speculation(figures: Mapping[str, Any]) -> Chart:
    """Tokens per second with and without guesses, by workload and batch."""
    return Chart(
        "speculation: tokens per second",
        " tok/s",
        ("with guesses", "without"),
        {
            f"{cell['workload']}, batch {cell['batch']}": [
                [turn["tokens_per_s"] for turn in cell[side]] for side in ("with_guesses", "without")
            ]
            for cell in figures["cells"]
        },
    )


def step_profile(figures: Mapping[str, Any]) -> Chart:
    """Shares of a step, by part; one series per batch and context."""
    profiles = figures["profiles"]
    names = [part["name"] for part in profiles[0]["parts"]]
    shares = [{part["name"]: 100 * part["seconds"] / one["step_s"] for part in one["parts"]} for one in profiles]
    return Chart(
        "step_profile: where the time of a decode step goes",
        " %",
        tuple(f"batch {one['batch']}, {one['context']} tokens" for one in profiles),
        {name: [[share[name]] for share in shares] for name in names},
    )


# Charts by the name of their script.
CHARTS: dict[str, Callable[[Mapping[str, Any]], Chart]] = {
    "prefix_reuse": prefix_reuse,
    "two_replicas": two_replicas,
    "overlap": overlap,
    "startup": startup,
    "image_light": image_light,
    "hit_cost": hit_cost,
    "decode_speed": decode_speed,
    "encode_speed": encode_speed,
    "edge_cost": edge_cost,
    "overload": overload,
    "speculation": speculation,
    "step_profile": step_profile,
}


def main() -> None:
    """Draws every chart whose figures are there."""
    FOLDER.mkdir(exist_ok=True)
    for script, chart in CHARTS.items():
        results = JSON_FOLDER / f"{script}.json"
        if results.exists():
            path = FOLDER / f"{script}.svg"
            path.write_text(draw(chart(json.loads(results.read_text("utf-8")))), "utf-8")
            print(f"drew {path}")


if __name__ == "__main__":
    main()
