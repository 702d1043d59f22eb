"""Compiles a service's C++ parts on first use, for this machine, and keeps the result in a folder.

A compiler is not required: without one a service does the same work through PyTorch. Headers that both services share
lie in `lookonce/native`. Only the services import this module; it needs torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence

# Before any library of ours: both then use the one OpenMP runtime, and its threads, that came first.
import torch

_HEADERS = pathlib.Path(__file__).with_name("native")
# Hidden: libraries that share headers, in one process, must not take each other's tables.
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-fvisibility=hidden")
# By what PyTorch says of the processor; levels of the x86-64 psABI.
_LEVELS = {"AVX512": ("-march=x86-64-v4", "-mprefer-vector-width=512"), "AVX2": ("-march=x86-64-v3",)}
_PRODUCTS_OF_PAIRS = ("-mavx512bf16",)
_COMPILE_TIMEOUT_S = 120


class NativeLibraryError(Exception):
    """There is no library; the text says why."""


class NativeLibrary:
    """The functions of the C++ parts. They take pointers and integers as ctypes has them, and give nothing back."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def function(self, name: str) -> Callable[..., None]:
        """By its name in the library. What calls it holds no lock of the interpreter meanwhile."""
        function = getattr(self._library, name)
        function.restype = None
        called: Callable[..., None] = function
        return called


@functools.cache
def load_library(sources: pathlib.Path) -> NativeLibrary:
    """The library made of all C++ files of a folder. Takes some seconds the first time on a machine.

    Raises NativeLibraryError.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise NativeLibraryError("there is no C++ compiler (g++, or what CXX names)")
    flags = _flags()
    try:
        path = cache_folder() / f"lookonce-{_fingerprint(compiler, flags, sources)}.so"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(path.parent)
        if not path.exists() or not _can_be_loaded(path):
            _compile(compiler, flags, sources, path)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        # RuntimeError: a user without a home.
        raise NativeLibraryError(f"it could not be compiled: {error}") from error
    try:
        return NativeLibrary(ctypes.CDLL(str(path)))
    except OSError as error:
        raise NativeLibraryError(f"the compiled library cannot be loaded: {error}") from error


def _can_be_loaded(path: pathlib.Path) -> bool:
    """A file that lost its contents with the machine's power would be in the way for ever."""
    try:
        ctypes.CDLL(str(path))
    except OSError:
        return False
    return True


def cache_folder() -> pathlib.Path:
    """Where compiled libraries are kept: of the user's own, since what lies there is run."""
    base = os.environ.get("XDG_CACHE_HOME")
    return pathlib.Path(base) / "lookonce" if base else pathlib.Path.home() / ".cache/lookonce"


def _flags() -> tuple[str, ...]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return _FLAGS
    level = _LEVELS.get(torch.backends.cpu.get_cpu_capability(), ())
    has_products_of_pairs = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return (*_FLAGS, *level, *(_PRODUCTS_OF_PAIRS if level and has_products_of_pairs else ()))


def _fingerprint(compiler: str, flags: tuple[str, ...], sources: pathlib.Path) -> str:
    """Of everything that decides what comes out."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=10).stdout
    parts = [compiler.encode(), version, " ".join(flags).encode(), platform.machine().encode()]
    parts += [path.read_bytes() for path in [*sorted(_HEADERS.iterdir()), *sorted(sources.iterdir())]]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def _compile(compiler: str, flags: tuple[str, ...], folder: pathlib.Path, path: pathlib.Path) -> None:
    """Beside its place first, so that processes that start together never load half a library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as workplace:
        sources = sorted(folder.glob("*.cpp"))
        if not sources:
            raise NativeLibraryError(f"{folder} has no C++ files")
        objects = [pathlib.Path(workplace) / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *flags, "-I", str(_HEADERS), "-c", "-o", str(built), str(source)]
            for built, source in zip(objects, sources, strict=True)
        ]
        _run_all(commands)
        built = pathlib.Path(workplace) / path.name
        _run_all([[compiler, *flags, "-shared", "-o", str(built), *map(str, objects)]])
        built.replace(path)


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """At the same time. Raises NativeLibraryError with the first line of what a compiler says that fails."""
    with contextlib.ExitStack() as running:
        processes = []
        for command in commands:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            running.callback(_end, process)
            processes.append(process)
        for command, process in zip(commands, processes, strict=True):
            said = process.communicate(timeout=_COMPILE_TIMEOUT_S)[1].decode("utf-8", "replace").strip().splitlines()
            if process.returncode != 0:
                raise NativeLibraryError(f"{command[0]} failed: {said[0] if said else process.returncode}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _check_owner(folder: pathlib.Path) -> None:
    """Raises NativeLibraryError where somebody else could put a library."""
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NativeLibraryError(f"{folder} must belong to this user, and nobody else may write to it")
