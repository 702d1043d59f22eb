"""The `lookonce` command, as a process where the process matters, and what it takes from its environment."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psutil
import pytest

from lookonce.client import Client
from lookonce.identity import CallerRole
from lookonce.local.stack_record import StackRecord
from lookonce.server.admission.authentication import parse_tokens
from tests.lookonce.command import run_here
from tests.lookonce.sdk.sdk_servers import System, running_system
from tests.tiny_models import build_llava_clip, random_image

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "lookonce.cli"]


@pytest.fixture
def environment(tmp_path: pathlib.Path) -> dict[str, str]:
    """A clean environment whose runtime folder is the test's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOOKONCE_")}
    (tmp_path / "run").mkdir(mode=0o700)
    return kept | {"XDG_RUNTIME_DIR": str(tmp_path / "run"), "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}


@pytest.fixture
def picture(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "picture.png"
    random_image(5).save(path)
    return path


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120
    )


async def _run_here(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a thread, because the servers that it calls need this one."""
    return await asyncio.to_thread(run_here, environment, *arguments)


@pytest.fixture
async def system() -> AsyncIterator[System]:
    async with running_system() as started:
        yield started


async def test_generate_streams_the_answer_to_stdout_and_the_cost_to_stderr(
    system: System, environment: dict[str, str], picture: pathlib.Path
) -> None:
    target = ["--target", system.decoder_target]
    finished = await asyncio.to_thread(
        run, environment, "generate", "hello there", "--image", str(picture), "--seed", "3", *target
    )
    assert (finished.returncode, finished.stdout) == (0, "hello there +1\n")
    assert "2 prompt tokens" in finished.stderr
    assert "first token after 250 ms" in finished.stderr
    assert system.decoder.last.sampling.seed == 3
    assert not system.decoder.last.sampling.HasField("temperature")


async def test_a_raw_prompt_with_images_has_one_deadline_for_both_calls(
    system: System, environment: dict[str, str], picture: pathlib.Path
) -> None:
    system.decoder.info_delay_s = 4.0
    arguments = ["hello", "--raw", "--image", str(picture), "--target", system.decoder_target]
    assert (await _run_here(environment, "generate", *arguments, "--timeout-s", "20")).stdout == "hello +1\n"
    left_s = {method: left for method, _, left in system.knowledge.calls}
    assert left_s["GetModelInfo"] <= 20
    # gRPC rounds deadlines, by some percent.
    assert left_s["GenerateStream"] <= left_s["GetModelInfo"] - 3
    system.knowledge.calls.clear()
    system.decoder.info_delay_s = 0.0
    assert (await _run_here(environment, "generate", *arguments, "--timeout-s", "inf")).returncode == 0
    assert all(left is None or left > 9e7 for _, _, left in system.knowledge.calls)


async def test_the_target_may_come_from_the_environment(system: System, environment: dict[str, str]) -> None:
    finished = await _run_here(environment | {"LOOKONCE_TARGET": system.decoder_target}, "generate", "hello")
    assert finished.stdout == "hello +0\n"


async def test_encode_and_lookup_list_the_images(
    system: System, environment: dict[str, str], picture: pathlib.Path
) -> None:
    target = ["--target", system.decoder_target]
    before = await _run_here(environment, "lookup", str(picture), *target)
    encoded = await _run_here(environment, "encode", str(picture), *target)
    after = await _run_here(environment, "lookup", str(picture), *target)
    assert [finished.returncode for finished in (before, encoded, after)] == [0, 0, 0]
    assert "no" in before.stdout.split()
    assert "computed" in encoded.stdout
    assert "yes" in after.stdout.split()


def test_without_any_target_the_error_names_the_remedy(environment: dict[str, str]) -> None:
    finished = run_here(environment, "generate", "hello")
    assert finished.returncode == 2
    assert "lookonce up" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_an_unreachable_target_is_a_short_error(environment: dict[str, str]) -> None:
    finished = run_here(environment, "generate", "hello", "--target", "127.0.0.1:1", "--timeout-s", "5")
    assert finished.returncode == 1
    assert finished.stderr.startswith("error: ")
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["encoder", "--help"], 0, "--max-image-bytes"),
        (["decoder", "--model", ".", "--listen", "0.0.0.0:1"], 2, "plaintext"),
    ],
)
def test_serve_hands_its_flags_to_the_service_and_takes_its_status(
    environment: dict[str, str], arguments: list[str], status: int, text: str
) -> None:
    finished = run(environment, "serve", *arguments)
    assert finished.returncode == status
    assert text in finished.stdout + finished.stderr


def test_a_hub_name_without_network_is_a_clear_error(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    finished = run(
        environment | {"HF_HOME": str(tmp_path)}, "serve", "encoder", "--model", "someone/never-published-this"
    )
    assert finished.returncode == 2
    assert "cannot be reached" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_doctor_reports_each_part_and_a_bad_model(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    finished = run_here(environment, "doctor")
    assert finished.returncode == 0, finished.stdout
    for subject in ("Python", "torch", "transformers", "Redis", "CPU features"):
        assert subject in finished.stdout
    bad = run_here(environment, "doctor", "--model", str(tmp_path))
    assert bad.returncode == 1
    assert "config.json" in bad.stdout


def test_doctor_says_when_the_configured_cache_is_away(environment: dict[str, str]) -> None:
    finished = run_here(environment | {"LOOKONCE_REDIS_URL": "unix:///nowhere.sock"}, "doctor")
    assert finished.returncode == 1
    assert "does not answer" in finished.stdout


def test_up_refuses_what_is_no_model_folder_before_it_starts_anything(
    environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    finished = run_here(environment, "up", "--model", str(tmp_path / "model.gguf"))
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr.startswith("error: ")
    assert len(finished.stderr.splitlines()) == 1
    assert "GGUF" in finished.stderr


def test_a_variable_that_nothing_reads_is_named(environment: dict[str, str]) -> None:
    finished = run(environment | {"LOOKONCE_TARGT": "127.0.0.1:1", "LOOKONCE_MODEL": "x"}, "models")
    assert finished.returncode == 0
    (line,) = finished.stderr.splitlines()
    assert line.startswith("warning: LOOKONCE_TARGT ")
    assert line.endswith("did you mean LOOKONCE_TARGET?")


def test_the_services_name_such_a_variable_in_their_logs(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    for service in ("encoder", "decoder"):
        changed = environment | {"LOOKONCE_REDIS_ULR": "SECRET", "LOOKONCE_MODEL": str(tmp_path)}
        finished = run(changed, "serve", service)
        warning, *_ = finished.stderr.splitlines()
        assert json.loads(warning)["level"] == "warning"
        assert "LOOKONCE_REDIS_ULR" in warning
        assert "did you mean LOOKONCE_REDIS_URL?" in warning
        assert "SECRET" not in finished.stderr


@pytest.fixture
def running_up(environment: dict[str, str], tmp_path: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    """`lookonce up` with two decoders on a tiny model, started as a script's background is: SIGINT ignored."""
    model = build_llava_clip(tmp_path / "tiny")
    command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *COMMAND, "up", "--model", str(model), "--decoders", "2"]
    command += ["--device", "cpu", "--playground", "--", "--max-num-seqs", "7"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=ROOT, **pipes) as process:
        yield process
        process.kill()


def test_up_serves_until_ctrl_c_and_the_other_commands_find_it(
    running_up: subprocess.Popen[str], environment: dict[str, str], picture: pathlib.Path
) -> None:
    assert running_up.stdout is not None
    lines: list[str] = []
    while not lines or not lines[-1].startswith("Ctrl-C"):
        lines.append(running_up.stdout.readline())
        assert lines[-1], running_up.stderr.read() if running_up.stderr else ""
    targets = [line.split()[1] for line in lines if line.startswith("decoder")]
    assert len(targets) == 2
    taken = run_here(
        environment, "up", "--model", str(picture.parent / "tiny"), "--port", targets[0].rpartition(":")[2]
    )
    assert (taken.returncode, taken.stdout) == (2, "")
    assert "Address already in use" in taken.stderr
    (page,) = [line.split()[1] for line in lines if line.startswith("gateway")]
    with urllib.request.urlopen(page, timeout=60) as answer:
        assert b"Lookonce playground" in answer.read()
    with urllib.request.urlopen(f"{page}v1/models", timeout=60) as answer:
        assert json.load(answer)["data"][0]["id"] == "tiny", "the gateway finds the decoders"
    with Client.connect(targets[0]) as client:
        assert client.model_info().max_running_requests == 7, "a flag behind -- reaches the service"
    # A second stack beside it: a command must not choose one of them by chance.
    other = StackRecord(os.getpid(), ("127.0.0.1:1",), ("127.0.0.1:2",), "127.0.0.1:3", (), ())
    directory = pathlib.Path(environment["XDG_RUNTIME_DIR"]) / "lookonce"
    other.write(directory)
    unclear = run_here(environment, "generate", "which one?")
    assert unclear.returncode == 2
    assert targets[0] in unclear.stderr
    other.remove(directory)
    asked = ["generate", "What is it?", "--image", str(picture), "--max-tokens", "4", "--temperature", "0"]
    first, second = run(environment, *asked), run_here(environment, *asked)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout == second.stdout
    assert "16 encoded" in first.stderr
    assert "0 encoded" in second.stderr
    assert "yes" in run_here(environment, "lookup", str(picture)).stdout.split()
    _kill_first_decoder(running_up)
    assert running_up.stderr is not None
    while "decoder-0 is ready again" not in (line := running_up.stderr.readline()):
        assert line, "`up` ended"
    third = run_here(environment, *asked)
    assert (third.returncode, third.stdout) == (0, first.stdout), third.stderr
    running_up.send_signal(signal.SIGINT)
    assert running_up.wait(60) == 0
    assert run_here(environment, "generate", "anyone there?").returncode == 2


def _kill_first_decoder(up: subprocess.Popen[str]) -> None:
    """Kills the decoder that was started first, which commands ask."""
    decoders = [one for one in psutil.Process(up.pid).children() if "decoder_svc" in one.cmdline()]
    min(decoders, key=lambda one: one.pid).kill()


def test_a_token_and_its_entry_belong_together(environment: dict[str, str]) -> None:
    finished = run_here(environment, "token", "shop", "--tenant", "acme")
    assert finished.returncode == 0
    (known,) = parse_tokens(finished.stderr.encode())
    assert known.digest == hashlib.sha256(finished.stdout.strip().encode()).digest()
    assert (known.identity.name, known.identity.tenant, known.identity.role) == ("shop", "acme", CallerRole.CLIENT)
    assert finished.stdout.strip() not in finished.stderr
    again = run_here(environment, "token", "shop", "--tenant", "acme")
    assert again.stdout != finished.stdout


@pytest.mark.parametrize("arguments", [["a b"], ["a", "--tenant", "../x"], ["a", "--role", "king"]])
def test_an_entry_that_services_would_refuse_is_not_made(environment: dict[str, str], arguments: list[str]) -> None:
    finished = run_here(environment, "token", *arguments)
    assert finished.returncode == 2
    assert finished.stdout == ""


async def test_the_token_comes_from_the_environment(
    system: System, environment: dict[str, str], picture: pathlib.Path
) -> None:
    asked = {**environment, "LOOKONCE_TOKEN": "a-token", "LOOKONCE_TARGET": system.decoder_target}
    assert (await _run_here(asked, "generate", "hello", "--image", str(picture))).returncode == 0
    assert system.knowledge.metadata["authorization"] == "Bearer a-token"
