"""Starts and stops a LocalStack with real processes."""

from __future__ import annotations

import io
import os
import pathlib
import signal
import socket
import tempfile
import time

import pytest

from lookonce.client import Client
from lookonce.errors import ConfigurationError, StartupError
from lookonce.local.local_stack import LocalStack, RedisSource
from lookonce.local.supervisor import Supervisor
from tests.lookonce.local.processes import is_gone, wait_until
from tests.tiny_models import build_llava_clip, random_image
from tests.warm_processes import WarmProcesses


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return build_llava_clip(tmp_path_factory.mktemp("model") / "tiny")


def test_the_stack_serves_counts_and_leaves_nothing_behind(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    progress: list[str] = []
    with LocalStack(tiny_model, num_decoders=0, on_progress=progress.append) as stack:
        assert stack.redis is not None
        redis_pid, (encoder,) = stack.redis.pid, stack.encoders
        with Client.connect("127.0.0.1:1", stack.encoder_targets[0]) as client:
            png = _png()
            assert [ref.encoding is not None for ref in client.encode([png, png])] == [True, True]
            assert client.lookup([png]) == [True]
        assert stack.metric(stack.encoders, "lookonce_encoder_encodes_total") == 1
    assert encoder.returncode == 0
    assert is_gone(redis_pid)
    assert list(tmp_path.iterdir()) == []
    assert progress


def test_a_stack_that_fails_to_start_stops_its_processes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "empty").mkdir()
    stack = LocalStack(tmp_path / "empty")
    with pytest.raises(StartupError, match=r"encoder-0 ended with status 2(.|\n)*config\.json"):
        stack.__enter__()
    assert stack.redis is not None
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_taken_port_is_found_before_anything_starts(tmp_path: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        stack = LocalStack(tmp_path, decoder_port=port)
        with pytest.raises(ConfigurationError, match=f"port {port} cannot be used: Address already in use"):
            stack.__enter__()
    assert (stack.redis, stack.encoders, stack.decoders) == (None, [], [])


def test_a_process_that_was_killed_is_started_again_at_its_addresses(
    tiny_model: pathlib.Path, warm_processes: WarmProcesses
) -> None:
    with warm_processes.for_stacks(), LocalStack(tiny_model, num_decoders=0, redis=RedisSource.NONE) as stack:
        (killed,), targets = stack.encoders, stack.encoder_targets
        addresses = killed.ready
        os.kill(killed.pid, signal.SIGKILL)
        lines: list[str] = []
        supervisor = Supervisor(stack, lines.append)
        wait_until(lambda: killed.returncode is not None)
        while not lines or "ready again" not in lines[-1]:
            supervisor.look()
            time.sleep(0.02)
        (again,) = stack.encoders
        assert lines == ["encoder-0 ended with status -9; it starts again in 0.5 s", "encoder-0 is ready again"]
        assert again is not killed
        assert again.ready == addresses
        assert stack.encoder_targets == targets
        assert stack.redis_url is None
        with Client.connect("127.0.0.1:1", targets[0]) as client:
            (ref,) = client.encode([_png()])
        assert ref.encoding is not None
        assert not ref.encoding.stored, "there is no shared cache"


def test_a_given_redis_is_used_and_none_is_started(tiny_model: pathlib.Path, warm_processes: WarmProcesses) -> None:
    stack = LocalStack(tiny_model, num_decoders=0, redis="unix:///nowhere.sock")
    with warm_processes.for_stacks(), stack:
        assert stack.redis is None
        assert stack.redis_url == "unix:///nowhere.sock"
        with Client.connect("127.0.0.1:1", stack.encoder_targets[0]) as client:
            (ref,) = client.encode([_png()])
        assert ref.encoding is not None
        # The answer arrives although the cache cannot be reached.
        assert not ref.encoding.stored


def _png() -> bytes:
    buffer = io.BytesIO()
    random_image(1).save(buffer, "PNG")
    return buffer.getvalue()
