"""Starts and stops a LocalStack and its children, as real processes."""

from __future__ import annotations

import io
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest

from lookonce.client import Client
from lookonce.errors import StartupError
from lookonce.local.child_process import ChildProcess
from lookonce.local.local_stack import LocalStack
from tests.tiny_models import build_llava_clip, random_image

ROOT = pathlib.Path(__file__).parents[3]
SERVICE = "tests.lookonce.server.serving_program"
ARGUMENTS = ["--model", ".", "--drain-timeout-s", "0"]


@pytest.fixture
def start(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ChildProcess]]:
    """Starts the small test service as a child process."""
    monkeypatch.chdir(ROOT)
    children: list[ChildProcess] = []

    def start_child(*flags: str) -> ChildProcess:
        name = f"service-{len(children)}"
        children.append(ChildProcess(name, SERVICE, [*ARGUMENTS, *flags], tmp_path))
        return children[-1]

    yield start_child
    for child in children:
        child.stop(5)


def _soon() -> float:
    return time.monotonic() + 60


def _is_gone(pid: int) -> bool:
    """Returns whether a process has ended and was reaped by its new parent."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_child_reports_its_address_and_drains_on_stop(start: Callable[..., ChildProcess]) -> None:
    child = start("--metrics-listen", "127.0.0.1:0")
    child.wait_until_ready(_soon())
    assert child.ready.target.startswith("127.0.0.1:")
    assert child.ready.metrics_port is not None
    assert child.returncode is None
    assert child.stop(10) == 0


def test_a_child_that_cannot_start_shows_the_end_of_its_log(start: Callable[..., ChildProcess]) -> None:
    child = start("--listen", "0.0.0.0:0")
    with pytest.raises(StartupError, match=r"status 2(.|\n)*plaintext"):
        child.wait_until_ready(_soon())


def test_a_child_that_is_not_ready_in_time_is_reported(start: Callable[..., ChildProcess]) -> None:
    child = start()
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(StartupError, match="in time"):
        child.wait_until_ready(time.monotonic() + 0.2)
    os.kill(child.pid, signal.SIGCONT)


def test_a_frozen_child_is_killed_after_the_timeout(start: Callable[..., ChildProcess]) -> None:
    child = start()
    child.wait_until_ready(_soon())
    os.kill(child.pid, signal.SIGSTOP)
    assert child.stop(0.3) == -signal.SIGKILL


def test_ctrl_c_in_the_terminal_reaches_the_parent_only(start: Callable[..., ChildProcess]) -> None:
    child = start()
    child.wait_until_ready(_soon())
    assert os.getsid(child.pid) != os.getsid(0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a process to its parent's end")
def test_children_end_with_a_killed_parent(tmp_path: pathlib.Path) -> None:
    script = f"""
import pathlib, sys, time
from lookonce.local.child_process import ChildProcess
child = ChildProcess("child", {SERVICE!r}, {ARGUMENTS!r}, pathlib.Path({str(tmp_path)!r}))
child.wait_until_ready(time.monotonic() + 60)
print(child.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not _is_gone(pid)
        parent.kill()
        _wait_until(lambda: _is_gone(pid))


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
        assert stack.failed() is None
    assert encoder.returncode == 0
    assert _is_gone(redis_pid)
    assert list(tmp_path.iterdir()) == []
    assert progress


def test_a_stack_that_does_not_start_stops_what_it_started(
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


def test_a_process_that_ends_by_itself_is_noticed(tiny_model: pathlib.Path) -> None:
    with LocalStack(tiny_model, num_decoders=0) as stack:
        os.kill(stack.encoders[0].pid, signal.SIGKILL)
        _wait_until(lambda: stack.failed() is not None)
        failed = stack.failed()
        assert failed is not None
        assert (failed.name, failed.returncode) == ("encoder-0", -signal.SIGKILL)


def test_a_process_that_was_killed_is_started_again_at_its_address(tiny_model: pathlib.Path) -> None:
    with LocalStack(tiny_model, num_decoders=0, use_redis=False) as stack:
        (killed,), targets = stack.encoders, stack.encoder_targets
        os.kill(killed.pid, signal.SIGKILL)
        _wait_until(lambda: killed.returncode is not None)
        again = stack.restart(killed)
        again.wait_until_ready(_soon())
        assert stack.encoders == [again]
        assert stack.encoder_targets == targets
        assert stack.redis_url is None
        with Client.connect("127.0.0.1:1", targets[0]) as client:
            (ref,) = client.encode([_png()])
        assert ref.encoding is not None
        assert not ref.encoding.stored, "there is no shared cache"
        assert stack.failed() is None


def test_a_given_redis_is_used_and_none_is_started(tiny_model: pathlib.Path) -> None:
    stack = LocalStack(tiny_model, num_decoders=0, redis_url="unix:///nowhere.sock")
    with stack:
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
