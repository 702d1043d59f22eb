"""The benchmark asks the service and the bare engine for the same tokens, and says what the difference is."""

from __future__ import annotations

import asyncio
import pathlib

import pytest

from benchmarks.bare_engine import RequestTimes
from benchmarks.edge_cost import Cell, Pair, measure, section
from tests.tiny_models import build_llava_clip

BARE = RequestTimes(first_token_s=(0.010, 0.012, 0.014), duration_s=0.9, engine_cpu_s=1.0)
SERVICE = RequestTimes(first_token_s=(0.013, 0.015, 0.018), duration_s=1.0, engine_cpu_s=1.3, reader_cpu_s=0.15)


def test_every_round_has_both_and_every_stream_its_first_token(tmp_path: pathlib.Path) -> None:
    pairs = asyncio.run(measure(build_llava_clip(tmp_path), 1, [1, 3], num_tokens=5, num_rounds=2))
    cells = [(engine, number) for engine in ("thread", "process") for number in (1, 3)]
    assert {cell: len(found) for cell, found in pairs.items()} == dict.fromkeys(cells, 2)
    for (_, num_streams), found in pairs.items():
        for times in (times for pair in found for times in (pair.service, pair.bare)):
            assert len(times.first_token_s) == (8 if num_streams == 1 else num_streams)
            assert 0 < min(times.first_token_s) <= max(times.first_token_s) <= times.duration_s
        assert all(pair.service.reader_cpu_s > 0 and pair.bare.reader_cpu_s == 0 for pair in found)


def test_the_row_tells_ratio_delay_and_cpu_time_per_token() -> None:
    cell = Cell("m", "process", 2, 3, 10, [Pair(SERVICE, BARE)])
    assert cell.edge_cpu_us(cell.pairs[0]) == pytest.approx((10_000, 5_000))
    row = "| m | process | 2 | 3 | 0.900 | 0.900 … 0.900 | 3.0 ms | 3.0 … 3.0 ms | 12.0 ms, 33/s | 10000 µs, 5000 µs |"
    assert row in section([cell])
