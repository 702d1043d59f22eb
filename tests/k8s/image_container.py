"""Builds an image of the Dockerfile with buildah, and runs it as a pod's security context says.

That is: the image's own user, no capabilities, no new privileges, a root that nobody can write to, and writable memory
at /tmp alone. There is no container runtime in it: mounts and processes are made by util-linux, so this wants root.
Containers have the host's network. Knows nothing of what the services answer.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from tests.conftest import DEMO_MODEL, REPOSITORY

BASE_VARIABLE = "LOOKONCE_IMAGE_BASE"
OPTIONS_VARIABLE = "LOOKONCE_IMAGE_OPTIONS"
_BUILD_TIMEOUT_S = 3600
# Some storage drivers copy all layers of an image for each container.
_STORAGE_TIMEOUT_S = 600
_COMMAND_TIMEOUT_S = 60
_STOP_TIMEOUT_S = 60
_TOOLS = ("buildah", "unshare", "nsenter", "chroot")

# Arguments: the root, the model's folder, a command. Runs in mount and process namespaces of its own.
_ENTER_SCRIPT = """\
set -eu
root=$1; model=$2; shift 2
mkdir -p "$root/model"
mount --bind "$root" "$root"
mount --bind "$model" "$root/model"
mount -o remount,bind,ro "$root/model"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -t tmpfs -o nosuid,mode=755 tmpfs "$root/dev"
for device in null zero random urandom; do
    : > "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir -m 1777 "$root/dev/shm"
mount -o remount,ro "$root/dev"
mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs "$root/tmp"
mount -o remount,bind,ro "$root"
exec chroot "$root" "$@"
"""


def skip_without_a_builder() -> str:
    """The base image to build on; skips the test where there is none, or what builds and runs is not there."""
    base = os.environ.get(BASE_VARIABLE)
    if not base:
        pytest.skip(f"{BASE_VARIABLE} names no image to build on: `make image-test` is for this")
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not on PATH: {', '.join(missing)}")
    if os.getuid() != 0:
        pytest.skip("only root can mount an image and give it a process of another user")
    return base


@dataclass(frozen=True, slots=True)
class Image:
    """An image in buildah's storage."""

    name: str
    # Settings from the Dockerfile: User, Env, WorkingDir, Entrypoint, Healthcheck and others.
    config: Mapping[str, Any]

    @classmethod
    def build(cls, target: str, base: str) -> Image:
        """Builds a target of the Dockerfile from the working tree. Layers that were built before are used again."""
        name = f"localhost/lookonce-{target}:test"
        command = ["bud", "--format", "docker", "--isolation", "chroot", "--layers"]
        command += ["--target", target, "--tag", name, "--build-arg", f"PYTHON_IMAGE={base}"]
        command += shlex.split(os.environ.get(OPTIONS_VARIABLE, ""))
        _buildah(*command, str(REPOSITORY), timeout_s=_BUILD_TIMEOUT_S)
        return cls(name, json.loads(_buildah("inspect", "--type", "image", name))["Docker"]["config"])

    @contextmanager
    def run(self, directory: pathlib.Path, **environment: str) -> Iterator[Container]:
        """Its entry point, with these variables beside the image's own; killed at the end where it still runs."""
        name = _buildah("from", self.name)
        try:
            root = _buildah("mount", name)
            container = Container(self.config, root, directory / f"{name}.log", environment)
            try:
                yield container
            finally:
                container.kill()
        finally:
            # Unmounts it, too.
            _buildah("rm", name)


class Container:
    """A running container; its log goes to a file."""

    def __init__(
        self, config: Mapping[str, Any], root: str, log_path: pathlib.Path, environment: Mapping[str, str]
    ) -> None:
        """Starts the entry point in the folder `root`, which is an image's."""
        self._config = config
        self._environment = environment
        self._log_path = log_path
        namespaces = ["unshare", "--mount", "--pid", "--fork"]
        script = ["sh", "-c", _ENTER_SCRIPT, "sh", root, str(DEMO_MODEL)]
        with log_path.open("wb") as log:
            self._starter = subprocess.Popen(
                [*namespaces, *script, *self._as_user(config["Entrypoint"])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        """Everything that the container has logged so far."""
        return self._log_path.read_text("utf-8", "replace")

    @property
    def returncode(self) -> int | None:
        """Exit status of the entry point, None while it runs."""
        return self._starter.poll()

    @property
    def process(self) -> psutil.Process:
        """The entry point's; there is one as soon as it has said something."""
        (process,) = psutil.Process(self._starter.pid).children()
        return process

    @property
    def processes(self) -> list[psutil.Process]:
        """All that run in it."""
        return [self.process, *self.process.children(recursive=True)]

    def check_health(self) -> subprocess.CompletedProcess[str]:
        """Runs the image's health check, as its user."""
        kind, *command = self._config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.execute(command)

    def execute(self, command: Sequence[str], *, as_root: bool = False) -> subprocess.CompletedProcess[str]:
        """Runs a command in it, as the image's user or as the root that may do everything."""
        enter = ["nsenter", "--target", str(self.process.pid), "--mount", "--pid", "--root", "--wd"]
        return subprocess.run(
            [*enter, *(command if as_root else self._as_user(command))],
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMMAND_TIMEOUT_S,
        )

    def terminate(self) -> int:
        """Sends SIGTERM, as Kubernetes does, and returns the exit status."""
        self.process.terminate()
        return self._starter.wait(_STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Whatever state it is in."""
        if self.returncode is not None:
            return
        # The entry point, which is the init process of all that run in the container. It would outlive its parent: a
        # change of user takes back the kernel's promise to end the one with the other.
        for process in psutil.Process(self._starter.pid).children():
            process.kill()
        self._starter.kill()
        self._starter.wait(_STOP_TIMEOUT_S)

    def _as_user(self, command: Sequence[str]) -> list[str]:
        user, _, group = self._config["User"].partition(":")
        rights = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs"]
        rights += ["--inh-caps=-all", "--bounding-set=-all"]
        variables = [*self._config["Env"], *(f"{name}={value}" for name, value in self._environment.items())]
        return [*rights, "env", "--ignore-environment", f"--chdir={self._config['WorkingDir']}", *variables, *command]


def kernels(container: Container) -> set[str]:
    """Compiled libraries of ours that the entry point has loaded, by their paths in the container."""
    maps = container.execute(["cat", "/proc/1/maps"])
    assert maps.returncode == 0, maps.stderr
    return set(re.findall(r"(/\S*/lookonce-[0-9a-f]{32}\.so)", maps.stdout))


def _buildah(*arguments: str, timeout_s: float = _STORAGE_TIMEOUT_S) -> str:
    """Runs buildah and returns its standard output without the final newline."""
    finished = subprocess.run(
        ["buildah", *arguments], capture_output=True, text=True, check=False, timeout=timeout_s, cwd=REPOSITORY
    )
    assert finished.returncode == 0, f"buildah {arguments[0]}: {finished.stderr[-4000:]}"
    return finished.stdout.strip()
