"""Compiles a service's C++ code for this machine on first use, and caches the library in a folder.

A compiler is optional: without one a service does the same work through PyTorch. Headers that both services share are
in `lookonce/model/kernels/native`. Needs torch, so only the services import this module.
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

# Import torch before loading our libraries: all of them then use the OpenMP runtime, and the threads, that it loads.
import torch  # noqa: F401

from lookonce.model.kernels.native_level import NativeLevel, native_level

_HEADERS = pathlib.Path(__file__).with_name("native")
# Hidden visibility: two libraries built from the same headers must not share symbols in one process.
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-fvisibility=hidden")
_COMPILE_TIMEOUT_S = 120


class NativeLibraryError(Exception):
    """The library cannot be compiled or loaded; the message gives the reason."""


class NativeLibrary:
    """The functions of a compiled library. They take ctypes pointers and integers and return nothing."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def function(self, name: str) -> Callable[..., None]:
        """Returns a function by its name in the library. Calls release the interpreter lock."""
        function = getattr(self._library, name)
        function.restype = None
        called: Callable[..., None] = function
        return called


def load_library(sources: pathlib.Path) -> NativeLibrary:
    """Returns the library built from all C++ files of a folder. Takes some seconds the first time on a machine.

    Raises NativeLibraryError; ConfigurationError if LOOKONCE_NATIVE_LEVEL names no level of this processor.
    """
    return library_of_level(sources, native_level())


@functools.cache
def library_of_level(sources: pathlib.Path, level: NativeLevel) -> NativeLibrary:
    """Returns the library built for processors of a level. Raises NativeLibraryError."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise NativeLibraryError("there is no C++ compiler (g++, c++ or the one that CXX names)")
    flags = (*_FLAGS, *level.flags)
    try:
        path = trusted_cache_folder() / f"lookonce-{_fingerprint(compiler, flags, sources)}.so"
        if not path.exists() or not _can_be_loaded(path):
            _compile(compiler, flags, sources, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeLibraryError(f"the native library could not be compiled: {error}") from error
    try:
        return NativeLibrary(ctypes.CDLL(str(path)))
    except OSError as error:
        raise NativeLibraryError(f"the compiled library cannot be loaded: {error}") from error


def _can_be_loaded(path: pathlib.Path) -> bool:
    """Whether the cached file is intact: a power loss may have truncated it, and it must then be rebuilt."""
    try:
        ctypes.CDLL(str(path))
    except OSError:
        return False
    return True


def cache_folder() -> pathlib.Path:
    """Returns the folder of compiled libraries. It belongs to the user, because its files are executed."""
    base = os.environ.get("XDG_CACHE_HOME")
    return pathlib.Path(base) / "lookonce" if base else pathlib.Path.home() / ".cache/lookonce"


def trusted_cache_folder() -> pathlib.Path:
    """Returns the folder of compiled libraries, and makes it. Raises OSError, or NativeLibraryError if it is not safe.

    It is safe if only this user can write to it.
    """
    try:
        folder = cache_folder()
    except RuntimeError as error:
        raise NativeLibraryError(f"the user has no home folder: {error}") from error
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder)
    return folder


def sources_hash(sources: pathlib.Path) -> str:
    """Returns a hash of the C++ files of a folder and of the headers that all kernels share."""
    files = [path.read_bytes() for path in [*sorted(_HEADERS.iterdir()), *sorted(sources.iterdir())]]
    return hashlib.sha256(b"".join(hashlib.sha256(file).digest() for file in files)).hexdigest()


def _fingerprint(compiler: str, flags: tuple[str, ...], sources: pathlib.Path) -> str:
    """Returns a hash of everything that determines the compiled library."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=10).stdout
    parts = [compiler.encode(), version, " ".join(flags).encode(), platform.machine().encode()]
    parts.append(sources_hash(sources).encode())
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def _compile(compiler: str, flags: tuple[str, ...], folder: pathlib.Path, path: pathlib.Path) -> None:
    """Builds the library in a temporary folder and moves it to `path`, so no process loads a partial file."""
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
    """Runs compilers concurrently. Raises NativeLibraryError with the first line of a failed compiler's output."""
    with contextlib.ExitStack() as running:
        processes = []
        for command in commands:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            running.callback(_kill, process)
            processes.append(process)
        for command, process in zip(commands, processes, strict=True):
            said = process.communicate(timeout=_COMPILE_TIMEOUT_S)[1].decode("utf-8", "replace").strip().splitlines()
            if process.returncode != 0:
                raise NativeLibraryError(f"{command[0]} failed: {said[0] if said else process.returncode}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _check_owner(folder: pathlib.Path) -> None:
    """Raises NativeLibraryError if another user could place a library in the folder."""
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NativeLibraryError(f"{folder} must belong to this user and must not be writable for others")
