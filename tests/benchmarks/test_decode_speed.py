"""The benchmark decodes with every backend and says how many bytes a step must read."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks.decode_speed import DecodeBench, section
from decoder_svc.runner.native_library import NativeLibraryError, load_library
from tests.tiny_models import HIDDEN_SIZE, NUM_LAYERS, build_llava_clip


def test_every_backend_decodes_in_turns(tmp_path: pathlib.Path) -> None:
    try:
        load_library()
    except NativeLibraryError as error:
        pytest.skip(f"there is no native library here: {error}")
    bench = DecodeBench("float32", max_batch=3, max_tokens=50, folder=build_llava_clip(tmp_path))
    short, long = bench.measure(1, 10, num_rounds=2, num_steps=3), bench.measure(3, 40, num_rounds=2, num_steps=3)
    assert {name: len(steps) for name, steps in long.steps_s.items()} == {"sdpa": 2, "native": 2}
    assert min(min(steps) for steps in long.steps_s.values()) > 0
    # Four query heads on two key heads: keys and values have half of the hidden size each.
    assert long.read_bytes - short.read_bytes == (3 * 40 - 10) * NUM_LAYERS * HIDDEN_SIZE * 4
    assert "| float32 | 3 | 40 |" in section([short, long])
