"""Groups of real Redis servers for tests: a primary with a replica and Sentinels, and a cluster."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import redis
import redis.exceptions
from redis.crc import key_slot

from lookonce.local.redis_server import _EXEC_SCRIPT, find_server

PASSWORD = "secret"
SERVICE = "cache"
TIMEOUT_S = 60.0
NUM_SLOTS = 16384
# Distance from the port for clients to the port that cluster nodes use among themselves.
_BUS_OFFSET = 10_000
# Linux gives ports from 32768 on by itself, other systems higher ones.
_PORTS = range(11_000, 22_000)
_QUORUM = 2


class RedisProcess:
    """One server on a free loopback port, in a directory of its own."""

    def __init__(self, settings: Sequence[str], *arguments: str, password: str = PASSWORD) -> None:
        self.port, self._reserved = _free_port()
        self._password = password
        self._directory = pathlib.Path(tempfile.mkdtemp(prefix="lookonce-"))
        lines = [f"port {self.port}", "bind 127.0.0.1", "daemonize no", *settings]
        (self._directory / "server.conf").write_text("\n".join(lines) + "\n")
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Address of the server as host:port."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """URL of this server alone."""
        return f"redis://:{self._password}@{self.address}"

    def start(self) -> None:
        """Starts the server and returns once it answers."""
        # The starter of the embedded server makes the server end with the test run, however that ends.
        command = [sys.executable, "-I", "-S", "-c", _EXEC_SCRIPT, str(os.getpid()), str(find_server()[0])]
        with (self._directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "server.conf", *self._arguments], cwd=self._directory, stdout=log, stderr=log
            )
        until(self._answers, f"port {self.port} does not answer", unless=self._failure)

    @contextlib.contextmanager
    def admin(self) -> Iterator[Any]:
        """Yields redis-py's own client for this server."""
        with redis.Redis(port=self.port, password=self._password or None, protocol=2, socket_timeout=5.0) as client:
            yield client

    def ask(self, *command: Any) -> Any:
        """Runs one command and returns its reply as redis-py parses it."""
        with self.admin() as client:
            return client.execute_command(*command)

    def kill(self) -> None:
        """Kills the server by SIGKILL and waits for its end."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stops the process for the block: its connections stay open and it does not reply."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ends the server and removes its files."""
        if self._process is not None:
            self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._reserved.close()

    def _answers(self) -> bool:
        try:
            return bool(self.ask("PING"))
        except redis.exceptions.RedisError:
            return False

    def _failure(self) -> str | None:
        """Returns why the server has ended, or None while it runs."""
        assert self._process is not None
        if self._process.poll() is None:
            return None
        log = (self._directory / "server.log").read_text(errors="replace")
        return f"the server on port {self.port} ended by itself: {log[-2000:]}"


class SentinelFleet:
    """A primary, its replica, and three Sentinels, of which two must agree on a failover."""

    def __init__(
        self, sentinel_settings: Sequence[str] = (), sentinel_password: str = "", down_after_ms: int = 1000
    ) -> None:
        """`down_after_ms`: a server that is silent for this time counts as down."""
        self.primary = RedisProcess(data_settings())
        self.replica = RedisProcess([*data_settings(), f"replicaof 127.0.0.1 {self.primary.port}"])
        monitor = [
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.primary.port} {_QUORUM}",
            f"sentinel auth-pass {SERVICE} {PASSWORD}",
            f"sentinel down-after-milliseconds {SERVICE} {down_after_ms}",
            f"sentinel failover-timeout {SERVICE} 2000",
            *sentinel_settings,
        ]
        self.sentinels = [RedisProcess(monitor, "--sentinel", password=sentinel_password) for _ in range(3)]

    @property
    def url(self) -> str:
        """URL of the service that names all Sentinels."""
        return self.url_by(self.sentinels)

    def url_by(self, sentinels: Sequence[RedisProcess]) -> str:
        """Returns the URL of the service that names only these Sentinels."""
        return f"redis+sentinel://:{PASSWORD}@{','.join(one.address for one in sentinels)}/{SERVICE}"

    def start(self) -> None:
        """Starts all servers and returns once a failover would succeed."""
        self.primary.start()
        self.replica.start()
        until(lambda: _is_replica_in_sync(self.replica), "the replica is not in sync")
        for sentinel in self.sentinels:
            sentinel.start()
            # By default Sentinels check every few seconds, and a busy machine puts them into TILT mode.
            for name, value_ms in (("info-period", 2000), ("publish-period", 100), ("tilt-trigger", 60_000)):
                sentinel.ask("SENTINEL", "DEBUG", name, value_ms)
        until(lambda: all(map(_knows_everybody, self.sentinels)), "the Sentinels do not see each other")

    def stop(self) -> None:
        """Ends all servers of the group."""
        for process in (*self.sentinels, self.replica, self.primary):
            process.stop()


class ClusterFleet:
    """A cluster of three primaries, of which the first has a replica."""

    def __init__(self, node_timeout_ms: int = 1000) -> None:
        """`node_timeout_ms`: a node that is silent for this time counts as down."""
        settings = [
            *data_settings(),
            "cluster-enabled yes",
            f"cluster-node-timeout {node_timeout_ms}",
            "cluster-require-full-coverage no",
        ]
        self.primaries = [RedisProcess(settings) for _ in range(3)]
        self.replica = RedisProcess(settings)

    @property
    def url(self) -> str:
        """URL that names all nodes but the last primary, which clients have to discover."""
        known = (*self.primaries[:2], self.replica)
        return f"redis+cluster://:{PASSWORD}@{','.join(one.address for one in known)}"

    def start(self) -> None:
        """Starts all nodes and returns once every node knows every slot."""
        nodes = [*self.primaries, self.replica]
        for node in nodes:
            node.start()
        for index, primary in enumerate(self.primaries):
            primary.ask("CLUSTER", "ADDSLOTS", *self.share_of(index))
        for index, node in enumerate(nodes):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for node in nodes[1:]:
            node.ask("CLUSTER", "MEET", "127.0.0.1", self.primaries[0].port)
        until(lambda: len(self.replica.ask("CLUSTER NODES")) == len(nodes), "the nodes do not meet")
        self.replica.ask("CLUSTER", "REPLICATE", node_id(self.primaries[0]))
        until(lambda: all(map(_sees_all_slots, nodes)), "the cluster does not come up")
        until(lambda: _is_replica_in_sync(self.replica), "the replica is not in sync")

    def share_of(self, index: int) -> range:
        """Returns the slots that this primary had at the start."""
        share = -(-NUM_SLOTS // len(self.primaries))
        return range(NUM_SLOTS)[index * share : (index + 1) * share]

    def primary_of(self, name: str) -> int:
        """Returns the index of the primary that had this key at the start."""
        slot = key_slot(name.encode())
        return next(index for index in range(len(self.primaries)) if slot in self.share_of(index))

    def stop(self) -> None:
        """Ends all servers of the group."""
        for process in (self.replica, *self.primaries):
            process.stop()


def data_settings() -> list[str]:
    """Returns the settings of a data server: a cache with a password and replication without delay."""
    return [
        'save ""',
        "appendonly no",
        "maxmemory 256mb",
        "maxmemory-policy allkeys-lfu",
        f"requirepass {PASSWORD}",
        f"masterauth {PASSWORD}",
        "repl-diskless-sync-delay 0",
    ]


def node_id(node: RedisProcess) -> str:
    """Returns the id of the node in the cluster."""
    name = node.ask("CLUSTER", "MYID")
    return name.decode() if isinstance(name, bytes) else str(name)


def until(
    condition: Callable[[], bool],
    failure: str,
    timeout_s: float = TIMEOUT_S,
    unless: Callable[[], str | None] = lambda: None,
) -> None:
    """Waits until `condition` holds; fails with `failure` after `timeout_s` seconds, and with a text of `unless`."""
    give_up_at_s = time.monotonic() + timeout_s
    while not condition():
        assert (found := unless()) is None, found
        assert time.monotonic() < give_up_at_s, failure
        time.sleep(0.02)


def _sees_all_slots(node: RedisProcess) -> bool:
    state = node.ask("CLUSTER INFO")
    return bool(state["cluster_state"] == "ok" and int(state["cluster_slots_ok"]) == NUM_SLOTS)


def _is_replica_in_sync(replica: RedisProcess) -> bool:
    with replica.admin() as client:
        state = client.info("replication")
    return bool(state["role"] == "slave" and state["master_link_status"] == "up")


def _knows_everybody(sentinel: RedisProcess) -> bool:
    with sentinel.admin() as client:
        state = client.sentinel_masters()[SERVICE]
    return bool(state["num-other-sentinels"] == 2 and state["num-slaves"] == 1)


def _free_port() -> tuple[int, BinaryIO]:
    """Returns a free port whose cluster port, _BUS_OFFSET above it, is free, too, and a file whose closing frees both.

    Both are below the ports that kernels give to connections and to servers that ask for any port. One of these could
    be taken between this call and the start of the server. The lock on the file keeps other test processes away.
    """
    folder = pathlib.Path(tempfile.gettempdir(), f"lookonce-ports-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    while True:
        port = random.SystemRandom().choice(_PORTS)
        # Ports that are _BUS_OFFSET apart have one file.
        file = (folder / str(port % _BUS_OFFSET)).open("wb")
        with contextlib.suppress(OSError), socket.socket() as listener, socket.socket() as bus:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            listener.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + _BUS_OFFSET))
            return port, file
        file.close()
