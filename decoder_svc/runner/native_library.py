"""Compiles the C++ parts of the CPU runner on first use, for this machine, and keeps the result in a cache folder.

A compiler is not required: without one the runner does the same work through PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile

# Before any library of ours: both then use the one OpenMP runtime, and its threads, that came first.
import torch

_SOURCE = pathlib.Path(__file__).with_name("paged_attention.cpp")
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-shared")
# By what PyTorch says of the processor; levels of the x86-64 psABI.
_LEVELS = {"AVX512": ("-march=x86-64-v4", "-mprefer-vector-width=512"), "AVX2": ("-march=x86-64-v3",)}
_COMPILE_TIMEOUT_S = 120


class NativeLibraryError(Exception):
    """There is no library; the text says why."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """The compiled library. Takes some seconds the first time on a machine. Raises NativeLibraryError."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise NativeLibraryError("there is no C++ compiler (g++, or what CXX names)")
    flags = _flags()
    try:
        path = cache_folder() / f"lookonce-{_fingerprint(compiler, flags)}.so"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(path.parent)
        if not path.exists():
            _compile(compiler, flags, path)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        # RuntimeError: a user without a home.
        raise NativeLibraryError(f"it could not be compiled: {error}") from error
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryError(f"the compiled library cannot be loaded: {error}") from error


def cache_folder() -> pathlib.Path:
    """Where compiled libraries are kept: of the user's own, since what lies there is run."""
    base = os.environ.get("XDG_CACHE_HOME")
    return pathlib.Path(base) / "lookonce" if base else pathlib.Path.home() / ".cache/lookonce"


def _flags() -> tuple[str, ...]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return _FLAGS
    return (*_FLAGS, *_LEVELS.get(torch.backends.cpu.get_cpu_capability(), ()))


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    """Of everything that decides what comes out."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=10).stdout
    parts = (_SOURCE.read_bytes(), compiler.encode(), version, " ".join(flags).encode(), platform.machine().encode())
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def _compile(compiler: str, flags: tuple[str, ...], path: pathlib.Path) -> None:
    """Beside its place first, so that processes that start together never load half a library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = pathlib.Path(folder) / path.name
        command = [compiler, *flags, "-o", str(built), str(_SOURCE)]
        finished = subprocess.run(command, capture_output=True, check=False, timeout=_COMPILE_TIMEOUT_S)
        if finished.returncode != 0:
            said = finished.stderr.decode("utf-8", "replace").strip().splitlines()
            raise NativeLibraryError(f"{compiler} failed: {said[0] if said else finished.returncode}")
        built.replace(path)


def _check_owner(folder: pathlib.Path) -> None:
    """Raises NativeLibraryError where somebody else could put a library."""
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NativeLibraryError(f"{folder} must belong to this user, and nobody else may write to it")
