"""A slow load of weights says in the log how far it has come; a fast one says nothing."""

from __future__ import annotations

import pytest
import torch
from structlog.testing import capture_logs

from lookonce.model.kernels import load_progress
from lookonce.model.kernels.linear_layers import replace_linears
from lookonce.model.kernels.load_progress import LoadProgress

MIB = 2**20


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_line_comes_every_five_seconds_with_bytes_and_speed() -> None:
    clock = Clock()
    progress = LoadProgress("layers are copied", 40, clock)
    with capture_logs() as logs:
        for _ in range(40):
            clock.now_s += 0.4
            progress.add(10 * MIB)
    # Each layer takes 0.4 s, so the lines come after the 13th, 26th and 39th.
    assert [(line["layers"], line["of_layers"], line["mib"], line["mib_per_s"]) for line in logs] == [
        (13, 40, 130, 25.0),
        (26, 40, 260, 25.0),
        (39, 40, 390, 25.0),
    ]
    assert {line["event"] for line in logs} == {"layers are copied"}


def test_a_fast_load_says_nothing() -> None:
    clock = Clock()
    progress = LoadProgress("layers are copied", 100, clock)
    with capture_logs() as logs:
        for _ in range(100):
            clock.now_s += 0.04
            progress.add(MIB)
    assert not logs


class Packed(torch.nn.Identity):  # type: ignore[misc]  # torch is untyped here
    nbytes = 3 * MIB


def test_every_layer_that_a_kernel_takes_over_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_progress, "_INTERVAL_S", 0.0)
    shared = torch.nn.Linear(8, 8)
    model = torch.nn.Sequential(shared, torch.nn.Linear(8, 8), shared)
    with capture_logs() as logs:
        assert replace_linears(model, lambda *_: Packed()) == 2
    assert [(line["layers"], line["of_layers"], line["mib"]) for line in logs] == [(1, 2, 3), (2, 2, 6)]
