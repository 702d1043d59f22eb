"""Tests of the cache server in the base: a real server accepts its configuration, and its container is large enough."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from lookonce.local.redis_server import find_server
from tests.k8s.render import Manifest, containers_of, render

BASE = pathlib.Path(__file__).parents[2] / "k8s/base"
GIB = 1 << 30
_START_TIMEOUT_S = 30.0
# Fragmentation and client buffers need memory in addition to the entries.
_MEMORY_FACTOR = 1.25


@pytest.fixture(scope="module")
def manifests() -> dict[str, Manifest]:
    """The manifests of the cache by kind."""
    return {one["kind"]: one for one in render(BASE) if one["metadata"]["name"] == "lookonce-redis"}


@pytest.fixture(scope="module")
def server(manifests: dict[str, Manifest], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yields a client of a real server with the configuration of the base, on a Unix socket."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "valkey.conf").write_text(manifests["ConfigMap"]["data"]["valkey.conf"])
    binary, _ = find_server()
    arguments = ["valkey.conf", "--port", "0", "--unixsocket", "s"]
    with subprocess.Popen([binary, *arguments], cwd=folder, stdout=subprocess.DEVNULL) as process:
        with redis.Redis(unix_socket_path=str(folder / "s"), decode_responses=True) as client:
            _wait_until_up(client, process)
            yield client
        process.send_signal(signal.SIGTERM)


def _wait_until_up(client: Any, process: subprocess.Popen[bytes]) -> None:
    give_up_at_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        assert process.poll() is None, "the server refused its configuration"
        try:
            client.ping()
        except redis.ConnectionError:
            assert time.monotonic() < give_up_at_s, "the server does not answer"
            time.sleep(0.02)
        else:
            return


def test_it_is_a_pure_cache(server: Any) -> None:
    wanted = {"save": "", "appendonly": "no", "maxmemory-policy": "volatile-lfu", "maxmemory-clients": "20%"}
    assert server.config_get(*wanted) == wanted


def test_the_container_has_room_for_more_than_maxmemory(server: Any, manifests: dict[str, Manifest]) -> None:
    (container,) = containers_of(manifests["Deployment"])
    limit = container["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    maxmemory_bytes = int(server.config_get("maxmemory")["maxmemory"])
    assert int(limit.removesuffix("Gi")) * GIB >= _MEMORY_FACTOR * maxmemory_bytes > GIB


def test_it_listens_where_its_service_leads(manifests: dict[str, Manifest]) -> None:
    (container,) = containers_of(manifests["Deployment"])
    lines = manifests["ConfigMap"]["data"]["valkey.conf"].splitlines()
    (port,) = (line.removeprefix("port ") for line in lines if line.startswith("port "))
    assert [entry["containerPort"] for entry in container["ports"]] == [int(port)]


def test_it_runs_with_the_mounted_configuration(manifests: dict[str, Manifest]) -> None:
    (container,) = containers_of(manifests["Deployment"])
    (mount,) = container["volumeMounts"]
    assert container["command"] == ["valkey-server", f"{mount['mountPath']}/valkey.conf"]
