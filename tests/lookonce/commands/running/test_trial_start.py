"""`lookonce doctor --start` with real services: folders whose files look right, and that cannot be served."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from lookonce.commands.running.trial_start import examine_start
from lookonce.local.cli_settings import CliSettings
from lookonce.local.doctor import examine
from lookonce.local.token_entry import new_token
from lookonce.model.pretrained_tokenizer import load_pretrained
from tests.lookonce.command import clean_environment, run_here
from tests.tiny_families import FAMILIES

COMMAND = [sys.executable, "-c", "from lookonce.cli import main; main()"]


def damage_text_weights(folder: pathlib.Path) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if "visual" not in name and name.endswith("layers.1.mlp.down_proj.weight"))
    tensors[name][0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})


def damage_the_question(folder: pathlib.Path) -> None:
    """Damages the embedding of a token that only the question has."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[name][load_pretrained(folder).convert_tokens_to_ids("?")] = torch.nan
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


def test_an_answer_that_is_not_a_number(tmp_path: pathlib.Path) -> None:
    FAMILIES["llava_clip"].build(tmp_path)
    damage_the_question(tmp_path)
    start, answer = examine_start(tmp_path)
    assert start.is_fine, start
    assert (answer.subject, answer.is_fine) == ("answer", False)
    assert re.fullmatch("the model computed NaN: .* may be damaged, incident [0-9a-f]{32}", answer.detail)


def trial(folder: pathlib.Path, tmp_path: pathlib.Path, **variables: str) -> list[str]:
    """Runs the command in a process of its own; returns its exit status and its last line, divided into cells."""
    environment = clean_environment(tmp_path) | variables
    command = [*COMMAND, "doctor", "--model", str(folder), "--start"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    return [str(done.returncode), *done.stdout.splitlines()[-1].split("\t")]


def test_services_that_want_a_token(tmp_path: pathlib.Path) -> None:
    folder = FAMILIES["llava_clip"].build(tmp_path / "model")
    token, client = new_token("me", "", "client")
    own, service = new_token("decoder", "", "service")
    entries, file = tmp_path / "tokens", tmp_path / "own"
    entries.write_text(client + service)
    file.write_text(own)
    for each in (entries, file):
        each.chmod(0o600)
    variables = {"LOOKONCE_AUTH_TOKENS_FILE": str(entries), "LOOKONCE_ENCODER_TOKEN_FILE": str(file)}
    *found, reason = trial(folder, tmp_path, **variables)
    assert found == ["1", "no", "answer"]
    assert "a bearer token is needed" in reason
    assert trial(folder, tmp_path, **variables, LOOKONCE_TOKEN=token)[:3] == ["0", "ok", "answer"]


def test_a_proxy_is_not_asked_for_services_on_this_machine(tmp_path: pathlib.Path) -> None:
    folder = FAMILIES["llava_clip"].build(tmp_path / "model")
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:9")
    assert trial(folder, tmp_path, **proxies)[:3] == ["0", "ok", "answer"]


def test_sigterm_stops_everything_in_order(tmp_path: pathlib.Path) -> None:
    folder = FAMILIES["llava_clip"].build(tmp_path / "model")
    files = tmp_path / "files"
    files.mkdir()
    environment = clean_environment(tmp_path) | {"TMPDIR": str(files)}
    command = [*COMMAND, "doctor", "--model", str(folder), "--start"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while not list(files.glob("lookonce-stack-*/*.log")):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.terminate()
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    # Those that the services started end with them, and the kernel may need a moment.
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    assert list(files.iterdir()) == []


def test_what_is_tried(tmp_path: pathlib.Path) -> None:
    folder = FAMILIES["llava_clip"].build(tmp_path / "model")
    assert trial(folder, tmp_path)[:3] == ["0", "ok", "answer"]
    (folder / "chat_template.jinja").unlink()
    assert trial(folder, tmp_path)[:3] == ["1", "ok", "answer"], "a fault that does not keep services from starting"
    (folder / "config.json").write_text("{}")
    assert trial(folder, tmp_path) == ["1", "no", "start", "not tried, because of the faults above"]
    assert "needs --model" in run_here(clean_environment(tmp_path), "doctor", "--start").stderr
