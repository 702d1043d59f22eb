"""Builds an image of the Dockerfile with buildah, and runs it with the rights of a pod's security context.

These are: the image's own user, no capabilities, no new privileges, a read-only root, and writable memory only at /tmp.
No container runtime is involved: util-linux makes the mounts and processes, which needs root. Containers use the host's
network. This module does not know the services' calls.
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
    """Returns the base image to build on. Skips the test if there is none, or if a tool is missing."""
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
    """A built image in buildah's storage."""

    name: str
    # Configuration that the Dockerfile sets: User, Env, WorkingDir, Entrypoint, Healthcheck, ….
    config: Mapping[str, Any]

    @classmethod
    def build(cls, target: str, base: str) -> Image:
        """Builds a target of the Dockerfile from the working tree. Layers that were built before are reused."""
        name = f"localhost/lookonce-{target}:test"
        command = ["bud", "--format", "docker", "--isolation", "chroot", "--layers"]
        command += ["--target", target, "--tag", name, "--build-arg", f"PYTHON_IMAGE={base}"]
        command += shlex.split(os.environ.get(OPTIONS_VARIABLE, ""))
        _buildah(*command, str(REPOSITORY), timeout_s=_BUILD_TIMEOUT_S)
        return cls(name, json.loads(_buildah("inspect", "--type", "image", name))["Docker"]["config"])

    @contextmanager
    def run(self, directory: pathlib.Path, **environment: str) -> Iterator[Container]:
        """Runs the entry point, with these variables in addition to the image's. Kills it at the end if needed."""
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
    """A container that runs an image's entry point."""

    def __init__(
        self, config: Mapping[str, Any], root: str, log_path: pathlib.Path, environment: Mapping[str, str]
    ) -> None:
        """Starts the entry point in the folder `root`, which holds the image's files."""
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
        """Output of the container so far."""
        return self._log_path.read_text("utf-8", "replace")

    @property
    def returncode(self) -> int | None:
        """Exit status of the entry point, None while it runs."""
        return self._starter.poll()

    @property
    def process(self) -> psutil.Process:
        """Process of the entry point. It exists as soon as the container has written output."""
        (process,) = psutil.Process(self._starter.pid).children()
        return process

    @property
    def processes(self) -> list[psutil.Process]:
        """All processes that run in the container."""
        return [self.process, *self.process.children(recursive=True)]

    def check_health(self) -> subprocess.CompletedProcess[str]:
        """Runs the image's health check as the image's user."""
        kind, *command = self._config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.execute(command)

    def execute(self, command: Sequence[str], *, as_root: bool = False) -> subprocess.CompletedProcess[str]:
        """Runs a command in the container, as the image's user or as root with all rights."""
        enter = ["nsenter", "--target", str(self.process.pid), "--mount", "--pid", "--root", "--wd"]
        return subprocess.run(
            [*enter, *(command if as_root else self._as_user(command))],
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMMAND_TIMEOUT_S,
        )

    def terminate(self) -> int:
        """Ends the container as Kubernetes does, and returns the exit status."""
        self.process.terminate()
        return self._starter.wait(_STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Kills the container in whatever state it is."""
        if self.returncode is not None:
            return
        # Kills the entry point, the container's init process. It would outlive its parent, because a change of user
        # cancels the kernel's parent-death signal.
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
    """Returns the paths, in the container, of our compiled libraries that the entry point has loaded."""
    maps = container.execute(["cat", "/proc/1/maps"])
    assert maps.returncode == 0, maps.stderr
    return set(re.findall(r"(/\S*/lookonce-[0-9a-f]{32}\.so)", maps.stdout))


def _buildah(*arguments: str, timeout_s: float = _STORAGE_TIMEOUT_S) -> str:
    """Runs buildah and returns its output without the last newline."""
    finished = subprocess.run(
        ["buildah", *arguments], capture_output=True, text=True, check=False, timeout=timeout_s, cwd=REPOSITORY
    )
    assert finished.returncode == 0, f"buildah {arguments[0]}: {finished.stderr[-4000:]}"
    return finished.stdout.strip()
