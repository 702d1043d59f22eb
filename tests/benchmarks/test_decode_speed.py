"""Both runners decode in turns, and the engine answers sets of requests; figures make sense, whatever they are."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest
import torch

from benchmarks import decode_speed, step_profile
from benchmarks.decode_speed import PeerCell, PrefillCell, section
from benchmarks.engine_thread import EngineThread
from benchmarks.models import demo_model
from benchmarks.runner_steps import RunnerSteps
from tests.tiny_models import HIDDEN_SIZE, NUM_LAYERS, build_llava_clip


def test_both_runners_decode_in_turns(tmp_path: pathlib.Path) -> None:
    bench = RunnerSteps(build_llava_clip(tmp_path), torch.float32, max_batch=3, max_tokens=50)
    short, long = bench.measure(1, 10, num_rounds=2, num_steps=3), bench.measure(3, 40, num_rounds=2, num_steps=3)
    assert {name: len(steps) for name, steps in long.steps_s.items()} == {"modules": 2, "ours": 2}
    assert min(min(steps) for steps in long.steps_s.values()) > 0
    # Four query heads on two key heads: keys and values have half of the hidden size each.
    assert long.read_bytes - short.read_bytes == (3 * 40 - 10) * NUM_LAYERS * HIDDEN_SIZE * 4
    page = section([short, long], [PeerCell("float32", 8, 64, [0.02], [0.03])], [PrefillCell("float32", 64, [1], [2])])
    assert "| float32 | 3 | 40 |" in page
    assert "| float32 | 8 | 64 | 30.0 ms | 20.0 ms | 1.50 |" in page


def test_the_engine_answers_sets_of_requests() -> None:
    with EngineThread(["--model", str(demo_model()), "--num-kv-blocks", "64", "--dtype", "float32"]) as engine:
        answers = engine.run([(300, 301, 302), (303,)], 5)
        again = engine.run([(300, 301, 302)], 1)
    assert len(answers) == 2
    assert all(answer.first_token_s > 0 and answer.decode_s > 0 for answer in answers)
    assert len(again) == 1


def test_the_quick_form_prints_its_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["decode_speed", "--quick"])
    monkeypatch.delenv("LOOKONCE_PEER_PYTHON", raising=False)
    decode_speed.main()
    printed = capsys.readouterr().out
    assert "peer: not run" in printed
    assert "The peer was not run." in printed


def test_the_profile_takes_every_part_of_a_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], library: None
) -> None:
    monkeypatch.setattr(sys, "argv", ["step_profile", "--quick"])
    step_profile.main()
    printed = capsys.readouterr().out
    (profile,) = json.loads(printed.splitlines()[-1])["profiles"]
    seconds = {part["name"]: part["seconds"] for part in profile["parts"]}
    assert len(seconds) == 13
    assert all(value > 0 for value in seconds.values())
    assert profile["step_s"] > 0
    assert profile["limit_s"] > 0
