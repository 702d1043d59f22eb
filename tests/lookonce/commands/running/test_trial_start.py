"""`lookonce doctor --start` with real services: folders whose files look right, and that cannot be served."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from lookonce.commands.running.trial_start import examine_start
from lookonce.local.cli_settings import CliSettings
from lookonce.local.doctor import examine
from tests.lookonce.command import clean_environment, run_here
from tests.tiny_families import FAMILIES


def damage_text_weights(folder: pathlib.Path) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if "visual" not in name and name.endswith("layers.1.mlp.down_proj.weight"))
    tensors[name][0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})


def damage_colours(folder: pathlib.Path) -> None:
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_mean": ["grey", 1, 2]}))


# A model that takes chats, and one that takes none.
@pytest.mark.parametrize("family", ["qwen2_5_vl", "paligemma2"])
def test_a_model_that_answers(family: str, tmp_path: pathlib.Path) -> None:
    FAMILIES[family].build(tmp_path)
    start, answer = examine_start(tmp_path)
    assert start.is_fine, start
    assert answer.is_fine, answer
    assert "tokens with a picture" in answer.detail


@pytest.mark.parametrize(
    ("damage", "service", "reason"),
    [
        (damage_text_weights, "decoder-0", "the language model computes NaN"),
        (damage_colours, "encoder-0", "the image processor does not fit the vision tower"),
    ],
)
def test_a_folder_that_only_looks_right(
    damage: Callable[[pathlib.Path], None], service: str, reason: str, tmp_path: pathlib.Path
) -> None:
    FAMILIES["qwen2_5_vl"].build(tmp_path)
    damage(tmp_path)
    assert all(finding.is_fine for finding in examine(CliSettings(), str(tmp_path)))
    (finding,) = examine_start(tmp_path)
    assert not finding.is_fine
    assert finding.detail.startswith(f"{service} ended with status 2: error: {reason}")
    assert "\n" not in finding.detail


def test_the_command(tmp_path: pathlib.Path) -> None:
    environment = clean_environment(tmp_path)
    assert "needs --model" in run_here(environment, "doctor", "--start").stderr
    folder = tmp_path / "model"
    folder.mkdir()
    FAMILIES["llava_clip"].build(folder)
    done = run_here(environment, "doctor", "--model", str(folder), "--start")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("ok\tanswer\t")
    (folder / "chat_template.jinja").write_text("{{ unclosed")
    done = run_here(environment, "doctor", "--model", str(folder), "--start")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "no\tstart\tnot tried, because of the faults above"
