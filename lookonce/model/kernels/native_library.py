"""Loads a service's compiled C++ code: from the wheel, or compiled for this machine on first use and kept in a folder.

A compiler is optional: without one, and without compiled code in the wheel, a service does the same work through
PyTorch. Needs torch, so only the services import this module.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

# Import torch before loading our libraries: all of them then use the OpenMP runtime, and the threads, that it loads.
import torch  # noqa: F401

from lookonce.model.kernels.native_compiler import (
    NativeLevel,
    NativeLibraryError,
    build_fingerprint,
    compile_library,
    find_compiler,
    is_intact,
    library_name,
)
from lookonce.model.kernels.native_level import native_level

# Only wheels with compiled code have it (hatch_build.py).
_COMPILED = pathlib.Path(__file__).with_name("compiled")


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
    """Returns the library built from all C++ files of a folder. May take some seconds the first time on a machine.

    Raises NativeLibraryError; ConfigurationError if LOOKONCE_NATIVE_LEVEL names no level of this processor.
    """
    return library_of_level(sources, native_level())


@functools.cache
def library_of_level(sources: pathlib.Path, level: NativeLevel) -> NativeLibrary:
    """Returns the library built for processors of a level. Raises NativeLibraryError."""
    path = _COMPILED / library_name(sources, level)
    if not path.exists():
        path = _compiled_here(sources, level)
    try:
        return NativeLibrary(ctypes.CDLL(str(path)))
    except OSError as error:
        raise NativeLibraryError(f"the compiled library cannot be loaded: {error}") from error


def library_identity(sources: pathlib.Path, level: NativeLevel) -> str:
    """Returns a name for what `library_of_level` loads. Sources, level, compiler and flags determine it."""
    name = library_name(sources, level)
    if (_COMPILED / name).exists():
        return name
    try:
        return build_fingerprint(find_compiler(), level, sources)
    except (NativeLibraryError, OSError, subprocess.TimeoutExpired):
        return f"{name}, no compiler"


def _compiled_here(sources: pathlib.Path, level: NativeLevel) -> pathlib.Path:
    """Returns the library's file in the cache folder, and compiles it if it is missing or damaged."""
    compiler = find_compiler()
    try:
        path = trusted_cache_folder() / f"lookonce-{build_fingerprint(compiler, level, sources)}.so"
        if not _is_usable(path):
            with _only_compiler(path.parent):
                if not _is_usable(path):
                    compile_library(compiler, level, sources, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeLibraryError(f"the native library could not be compiled: {error}") from error
    return path


def _is_usable(path: pathlib.Path) -> bool:
    return path.exists() and is_intact(path)


@contextmanager
def _only_compiler(folder: pathlib.Path) -> Iterator[None]:
    """Waits until no other process compiles into the folder, so that services that start together share the work.

    The lock ends with its process. Where the file system has no locks, several processes may do the same work.
    """
    with ExitStack() as opened:
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


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
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NativeLibraryError(f"{folder} must belong to this user and must not be writable for others")
    return folder
