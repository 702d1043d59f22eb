"""The benchmark encodes the same images on every side, and its ratios are those of the rounds."""

from __future__ import annotations

import json
import pathlib

import pytest

from benchmarks import report
from benchmarks.encode_speed import Cell, Figures, main, measure, section
from tests.tiny_models import build_llava_clip


def test_every_side_encodes_in_turns_and_gives_the_same_rows(tmp_path: pathlib.Path) -> None:
    figures = measure(build_llava_clip(tmp_path), "float32", 2, [1, 2], 2, None)
    assert [cell.batch for cell in figures.cells] == [1, 2]
    for cell in figures.cells:
        assert {side: len(seconds) for side, seconds in cell.seconds.items()} == {"lookonce": 2, "transformers": 2}
        assert min(min(seconds) for seconds in cell.seconds.values()) > 0
    assert figures.row_distance["transformers"] < 1e-5
    assert len(figures.through_pipeline_s) == 2
    assert "| float32 | 2 |" in section({"float32": figures})


def test_a_ratio_is_that_of_images_per_second_in_the_same_round() -> None:
    cell = Cell("bfloat16", 8, 8, {"lookonce": [2.0, 4.0, 1.0], "transformers": [3.0, 4.0, 4.0], "vllm": [1.0] * 3})
    assert cell.ratios("transformers") == [1.5, 1.0, 4.0]
    text = section(
        {"bfloat16": Figures((cell,), {"transformers": 0.01, "vllm": 0.02}, ((1.0, 2.0), (2.0, 2.0), (1.0, 4.0)))}
    )
    assert "| bfloat16 | 8 | 4.00 | 2.00 | 1.50 | 1.00 … 4.00 | 8.00 | 0.50 | 0.25 … 1.00 |" in text
    assert "1.0e-02 (transformers), 2.0e-02 (vllm)" in text
    assert "0.50 of the forward's rate (0.25 … 1.00)" in text


@pytest.mark.parametrize("batches", [[1], [2, 1]])
def test_without_the_peer_its_columns_are_absent(batches: list[int], tmp_path: pathlib.Path) -> None:
    figures = measure(build_llava_clip(tmp_path), "bfloat16", 2, batches, 1, None)
    assert "vllm" not in section({"bfloat16": figures})
    assert figures.row_distance["transformers"] < 0.05


def test_the_quick_form_runs_both_element_types_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOOKONCE_PEER_PYTHON", raising=False)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "RESULTS.md")
    monkeypatch.setattr(report, "JSON_FOLDER", tmp_path / "results")
    main(["--quick"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [cell["batch"] for cell in figures["float32"]["cells"]] == [1, 2]
    assert (
        figures["float32"]["row_distance"]["transformers"] < 1e-5 < figures["bfloat16"]["row_distance"]["transformers"]
    )
    assert not list(tmp_path.iterdir())
