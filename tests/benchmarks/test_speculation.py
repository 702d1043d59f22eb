"""The benchmark says what its scripts say, with guesses and without, and what each took."""

from __future__ import annotations

import json
import pathlib
import random

import pytest

from benchmarks import models, report, speculation
from benchmarks.speculation import WORKLOADS, SpeculationBench, copied, misleading, quoting, section
from decoder_svc.scheduling.speculation import SpeculationLimits


def test_copies_are_guessed_and_nothing_is_lost() -> None:
    bench = SpeculationBench(models.demo_model(), max_batch=3, prompt_tokens=64, answer_tokens=24)
    cell = bench.measure("copied", 3, SpeculationLimits(4), num_rounds=2)
    other = bench.measure("fresh", 1, SpeculationLimits(4), num_rounds=2)
    assert (len(cell.without), len(cell.with_guesses)) == (2, 2)
    for without, guessed in zip(cell.without, cell.with_guesses, strict=True):
        assert (without.num_steps, without.num_drafted) == (23, 0)
        assert guessed.num_steps < 12
        assert guessed.num_drafted >= guessed.num_accepted > 40
        assert min(without.tokens_per_s, guessed.tokens_per_s) > 0
    assert "| fresh | 1 |" in section("demo", 4, [cell, other])


def test_scripts_match_their_names() -> None:
    draw = random.Random(1)
    prompt = tuple(range(300, 556))
    answer = copied(draw, prompt, 96)
    assert any(prompt[start : start + 96] == answer for start in range(len(prompt)))
    assert sum(token in prompt for token in quoting(draw, prompt, 96)) >= 48
    assert len(set(misleading(draw, prompt, 96))) <= 12


def test_the_quick_form_runs_and_keeps_no_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "RESULTS.md")
    monkeypatch.setattr(report, "JSON_FOLDER", tmp_path / "results")
    speculation.main(["--quick", "--answer-tokens", "16", "--prompt-tokens", "48"])
    assert not list(tmp_path.iterdir())
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [cell["workload"] for cell in figures["cells"]] == list(WORKLOADS)
    assert all(
        cell["with_guesses"][0]["num_steps"] <= cell["without"][0]["num_steps"] == 15 for cell in figures["cells"]
    )
