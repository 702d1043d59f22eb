"""A model that computes NaN, or whose files cannot be read, is refused when it is loaded, in one line."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoder_svc.service import load_text
from decoder_svc.settings import DecoderSettings
from lookonce.errors import ModelFolderError
from lookonce.model.half_model import load_text_half
from lookonce.model.model_folder import ModelFolder
from lookonce.server.settings_parser import parse_settings
from tests.conftest import DEMO_MODEL, REPOSITORY

# Ends of names of tensors.
NORM = ".layers.0.input_layernorm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    copied = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, copied)
    return copied


def decoder_log(folder: pathlib.Path, *flags: str) -> str:
    """Returns what a decoder logs that must end by itself, with the exit status for wrong configuration."""
    command = [sys.executable, "-m", "decoder_svc", "--model", str(folder), "--listen", "127.0.0.1:0", *flags]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def change_tensor(folder: pathlib.Path, name: str, change: object) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    (found,) = (key for key in tensors if key.endswith(name))
    tensors[found] = change(tensors[found])  # type: ignore[operator]
    save_file(tensors, file, metadata={"format": "pt"})


def spoilt(value: float) -> object:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[3] = value
        return tensor

    return change


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("flags", [(), ("--quantize", "int8"), ("--kv-cache-dtype", "int8")], ids=str)
def test_a_weight_that_is_no_number_ends_the_decoder(
    folder: pathlib.Path, value: float, flags: tuple[str, ...]
) -> None:
    change_tensor(folder, QUERY, spoilt(value))
    log = decoder_log(folder, *flags)
    assert "the language model computes NaN" in log
    assert "Traceback" not in log


def test_a_norm_that_divides_by_nothing_ends_the_decoder(folder: pathlib.Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] = -1.0
    (folder / "config.json").write_text(json.dumps(config))
    assert "the language model computes NaN" in decoder_log(folder)


def test_a_context_without_room_ends_the_decoder(folder: pathlib.Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    assert "max_position_embeddings is 1" in decoder_log(folder)


@pytest.mark.parametrize("dtype", ["I32", "U32"])
def test_integers_do_not_become_weights(folder: pathlib.Path, dtype: str) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    (found,) = (key for key in header if key.endswith(NORM))
    header[found]["dtype"] = dtype
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + header_bytes :])
    with pytest.raises(ModelFolderError, match=f"has elements of the type {dtype}"):
        load_text_half(folder, None, "sdpa")


def test_a_header_that_contradicts_itself_is_told(folder: pathlib.Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    (found,) = (key for key in header if key.endswith(NORM))
    header[found]["shape"][0] += 1
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + header_bytes :])
    with pytest.raises(ModelFolderError, match="cannot be read; download them again"):
        load_text_half(folder, None, "sdpa")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer_config.json"])
def test_a_pipe_is_no_file(folder: pathlib.Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelFolderError, match="is no regular file"):
        ModelFolder.open(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "processor_config.json"])
def test_json_without_a_bottom_is_told(folder: pathlib.Path, name: str) -> None:
    (folder / name).write_text("[" * 100_000)
    with pytest.raises(ModelFolderError, match="nested too deeply"):
        ModelFolder.open(folder)


def test_pools_beyond_any_memory_are_refused_as_settings(folder: pathlib.Path) -> None:
    assert "--num-kv-blocks: Input should be less" in decoder_log(folder, "--num-kv-blocks", str(2**63 - 1))


def test_an_end_token_that_is_not_there_is_logged(folder: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = parse_settings(DecoderSettings, ["--model", str(folder)], "decoder_svc")
    load_text(settings)
    assert "no end token" not in capfd.readouterr().err
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": 10**9}))
    load_text(settings)
    assert "has no end token of this folder" in capfd.readouterr().err
