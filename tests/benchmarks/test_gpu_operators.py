"""Operators of the CUDA path: counted by the script, and bounded by goals that do not depend on a machine."""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu_operators
from tests.decoder_svc.runner.cuda.interpreted_triton import TritonBackend


def test_operators_are_counted_and_few(capsys: pytest.CaptureFixture[str]) -> None:
    assert TritonBackend.name == "triton"
    gpu_operators.main(["--quick"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    (step,) = figures["steps"]
    assert 0 < step["per_layer"] <= 14
    assert step["copies_to_device"] == 1
    assert step["synchronisations"] == 1, "the tokens"
    eager, recorded = figures["mixed"]
    assert (eager["has_graphs"], recorded["has_graphs"]) == (False, True)
    assert eager["launches"] > step["per_layer"] * 4
    assert recorded["launches"] == 1, "the graph; greedy tokens are taken inside"
    assert (recorded["copies_to_device"], recorded["synchronisations"]) == (1, 1)
    samples = {each["kind"]: each["operators"] for each in figures["samples"]}
    # The choice itself; three more note rows of NaN.
    assert samples["greedy"] == 4
    # 1.2 for each row of a batch of 64.
    assert 1 < samples["temperature"] < samples["top-p"] <= max(samples.values()) < 77


def test_sampling_takes_the_same_operators_for_any_number_of_rows() -> None:
    with gpu_operators.simulated_cuda() as cuda:
        for kind in gpu_operators.KINDS:
            counts = {gpu_operators.count_samples(cuda, batch, kind).operators for batch in (3, 8)}
            assert len(counts) == 1
