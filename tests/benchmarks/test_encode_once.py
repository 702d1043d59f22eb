"""The benchmark runs against really started services and counts what it claims to count."""

from __future__ import annotations

import pathlib

from benchmarks.encode_once import Load, Setup, measure
from tests.tiny_models import build_llava_clip


def test_each_new_picture_is_encoded_once_in_every_burst(tmp_path: pathlib.Path) -> None:
    load = Load(num_pictures=2, requests_per_decoder=4, num_rounds=2)
    rounds = measure(build_llava_clip(tmp_path), Setup(num_encoders=1, num_decoders=2), load)
    assert [(one.num_requests, one.num_encodes) for one in rounds] == [(8, 2), (8, 2)]
