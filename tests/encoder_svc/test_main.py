"""The process serves until SIGTERM, and refuses to start, with the reason, when it could not serve correctly."""

from __future__ import annotations

import json
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable

import grpc

from lookonce.common.v1 import common_pb2
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.local.reserved_port import reserved_port
from tests import image_files

START_TIMEOUT_S = 90


def start(*arguments: str) -> subprocess.Popen[str]:
    """Runs `python -m encoder_svc` as a child process."""
    command = [sys.executable, "-m", "encoder_svc", "--num-threads", "1", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_process_serves_until_sigterm(
    tiny_folder: Callable[[str], pathlib.Path], shared_redis: EmbeddedRedis, tmp_path: pathlib.Path
) -> None:
    ready_file = tmp_path / "ready.json"
    model = str(tiny_folder("llava_clip"))
    process = start("--model", model, "--redis-url", shared_redis.url, "--ready-file", str(ready_file))
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not ready_file.exists():
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        with grpc.insecure_channel(json.loads(ready_file.read_text())["target"]) as channel:
            image = common_pb2.ImageSource(data=image_files.encoded(image_files.noise(77)))
            response = EncoderServiceStub(channel).Encode(pb.EncodeRequest(items=[pb.EncodeItem(image=image)]))
        assert response.results[0].stored
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=START_TIMEOUT_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["event"] for line in lines if line["event"] in ("ready", "stopped")] == ["ready", "stopped"]


def test_metrics_are_there_while_the_model_is_being_loaded(tiny_folder: Callable[[str], pathlib.Path]) -> None:
    with reserved_port() as port, reserved_port() as metrics_port:
        addresses = ("--listen", f"127.0.0.1:{port}", "--metrics-listen", f"127.0.0.1:{metrics_port}")
        process = start("--model", str(tiny_folder("llava_clip")), *addresses)
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not listens(metrics_port):
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            assert not listens(port)
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as response:
                assert "process_resident_memory_bytes" in response.read().decode()
        finally:
            process.kill()
            process.communicate()


def listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def test_an_unusable_model_folder_is_refused_with_the_reason(
    tiny_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(tiny_folder("llava_clip"), tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    process = start("--model", str(folder))
    _, log = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 2
    assert "pickled weights only" in log
    assert "Traceback" not in log
