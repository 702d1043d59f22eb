"""`python -m decoder_svc` as operators run it: it starts, serves and drains, or refuses to start with the reason."""

from __future__ import annotations

import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decoder_svc.__main__ import ENGINE_PART, serve
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.decoder.v1.decoder_service_pb2_grpc import DecoderServiceStub
from lookonce.errors import ConfigurationError, ModelFolderError
from tests.decoder_svc.decoders import params
from tests.rust_panic import change_tokenizer, with_short_table
from tests.tiny_families import FAMILIES

SMALL = ("--num-threads", "1", "--num-kv-blocks", "20", "--max-context-tokens", "300")


@contextmanager
def started(ready_file: pathlib.Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The running process and the content of its ready file."""
    command = [sys.executable, "-m", "decoder_svc", "--ready-file", str(ready_file), *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while not ready_file.exists():
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.05)
        yield process, json.loads(ready_file.read_text())
    finally:
        process.kill()
        process.communicate()


def test_serves_drains_on_sigterm_and_exits_with_0(
    model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    arguments = ("--model", str(model_folder("llava_clip")), "--metrics-listen", "127.0.0.1:0", *SMALL)
    with started(tmp_path / "ready.json", *arguments) as (process, ready):
        with grpc.insecure_channel(ready["target"]) as channel:
            stub = DecoderServiceStub(channel)
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "lookonce.decoder.v1.DecoderService", ENGINE_PART):
                status = health.Check(health_pb2.HealthCheckRequest(service=name)).status
                assert status == health_pb2.HealthCheckResponse.SERVING
            request = params("zebra", max_tokens=200, ignore_eos=True)
            stream = stub.GenerateStream(pb.GenerateStreamRequest(params=request), timeout=60)
            assert next(stream).started.usage.prompt_tokens > 0
            process.send_signal(signal.SIGTERM)
            events = list(stream)
            assert events[-1].finished.usage.completion_tokens == 200
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0
        lines = [json.loads(line) for line in log.splitlines()]
        assert any(line.get("code") == "OK" for line in lines)
        assert "zebra" not in log


def test_refuses_to_start_with_status_2_and_the_reason(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "decoder_svc", "--model", str(tmp_path / "missing")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert "is not a folder" in result.stderr
    assert "Traceback" not in result.stderr


async def test_a_folder_whose_template_cannot_be_served_is_refused(
    model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(model_folder("llava_clip"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].role }}")
    with pytest.raises(ModelFolderError, match="writes 0 × <image>"):
        await serve(["--model", str(folder)])


@pytest.mark.parametrize("family", ["llava_clip", "smolvlm"])
async def test_a_folder_whose_tokenizer_panics_on_ordinary_texts_is_refused(
    family: str, tmp_path: pathlib.Path
) -> None:
    folder = FAMILIES[family].build(tmp_path / "model")
    change_tokenizer(folder, normalizer=with_short_table({}, num_entries=0)["normalizer"])
    with pytest.raises(ModelFolderError, match="tokenizer fails on ordinary texts; download"):
        await serve(["--model", str(folder)])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--block-size", "0"), "--block-size"),
        (("--listen", "0.0.0.0:0"), "plaintext"),
        (
            ("--ready-file", "/no/such/folder/ready.json"),
            "ready_file: cannot write /no/such/folder/ready.json: No such",
        ),
    ],
)
async def test_settings_that_cannot_be_served_are_refused(
    model_folder: Callable[[str], pathlib.Path], arguments: tuple[str, str], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        await serve(["--model", str(model_folder("llava_clip")), *arguments])


@pytest.mark.parametrize(
    ("setting", "content", "reason"),
    [
        ("encoder-token-file", None, "encoder_token_file: .*given"),
        ("encoder-token-file", b"\n", "encoder_token_file: .*given"),
        ("encoder-tls-ca", None, "given"),
        ("encoder-tls-ca", b"no certificate", "given is no PEM file"),
    ],
)
async def test_files_for_calls_to_encoders_are_read_before_the_model_is_loaded(
    model_folder: Callable[[str], pathlib.Path],
    setting: str,
    content: bytes | None,
    reason: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("decoder_svc.__main__.import_lean_transformers", pytest.fail)
    if content is not None:
        (tmp_path / "given").write_bytes(content)
    arguments = ["--model", str(model_folder("llava_clip")), "--encoder-target", "127.0.0.1:1"]
    with pytest.raises(ConfigurationError, match=reason):
        await serve([*arguments, f"--{setting}", str(tmp_path / "given")])
