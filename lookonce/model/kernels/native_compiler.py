"""Compiles the C++ kernels for a kind of processor. Knows neither caches nor PyTorch.

Uses the standard library only, and nothing else of this package, because the build of a wheel runs this file alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

# Headers that the kernels of both services share.
HEADERS = pathlib.Path(__file__).with_name("native")
# Hidden visibility: two libraries built from the same headers must not share symbols in one process.
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-fvisibility=hidden")
_SUFFIXES = (".cpp", ".h")
_COMPILE_TIMEOUT_S = 120
# At the end of each library, see `_seal`.
_HASH_BYTES = 32
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_X86, _ARM = "x86_64", "aarch64"
_V3_FEATURES = frozenset({"avx2", "fma3", "bmi2", "f16c"})
_V4 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_V4_FEATURES = _V3_FEATURES | {"avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl"}
_PAIRS = ("-mavx512bf16", "-mavx512vnni")
_PAIR_FEATURES = _V4_FEATURES | {"avx512_bf16", "avx512_vnni"}


class NativeLibraryError(Exception):
    """The library cannot be compiled or loaded; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class NativeLevel:
    """A set of instructions that kernels are compiled for."""

    name: str
    # The architecture, as `platform.machine()` names it.
    machine: str
    # Flags of GCC and Clang.
    flags: tuple[str, ...]
    # Features that a processor must have, as PyTorch names them; those with a number as `name=number`.
    features: frozenset[str]


# Lowest first. x86-64 levels up to avx512 are those of its psABI. Compilers must know the length of SVE's vectors.
LEVELS = (
    NativeLevel("x86_64", _X86, (), frozenset()),
    NativeLevel("avx2", _X86, ("-march=x86-64-v3",), _V3_FEATURES),
    NativeLevel("avx512", _X86, _V4, _V4_FEATURES),
    NativeLevel("avx512_bf16", _X86, (*_V4, *_PAIRS), _PAIR_FEATURES),
    NativeLevel(
        "amx_bf16",
        _X86,
        (*_V4, *_PAIRS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        _PAIR_FEATURES | {"amx_tile", "amx_bf16", "amx_int8"},
    ),
    NativeLevel("neon", _ARM, (), frozenset()),
    NativeLevel("neon_bf16", _ARM, ("-march=armv8.2-a+bf16",), frozenset({"bf16"})),
    NativeLevel(
        "sve256_bf16",
        _ARM,
        ("-march=armv8.2-a+sve+bf16", "-msve-vector-bits=256"),
        frozenset({"bf16", "sve_bf16", "sve_max_length=32"}),
    ),
)


def machine_levels(machine: str | None = None) -> tuple[NativeLevel, ...]:
    """Returns the instruction set levels of an architecture, lowest first. Every processor of it has the first one.

    `machine` None means the architecture of this machine.
    """
    name = (machine or platform.machine()).lower()
    name = _MACHINES.get(name, name)
    levels = tuple(level for level in LEVELS if level.machine == name)
    return levels or (NativeLevel(name, name, (), frozenset()),)


def find_compiler() -> str:
    """Returns the path of the C++ compiler: the one that CXX names, g++ or c++. Raises NativeLibraryError."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise NativeLibraryError("there is no C++ compiler (g++, c++ or the one that CXX names)")
    return compiler


def sources_hash(sources: pathlib.Path) -> str:
    """Returns a hash of the C++ files of a folder and of the shared headers."""
    paths = [path for folder in (HEADERS, sources) for path in sorted(folder.iterdir()) if path.suffix in _SUFFIXES]
    files = [path.read_bytes() for path in paths]
    return hashlib.sha256(b"".join(hashlib.sha256(file).digest() for file in files)).hexdigest()


def library_name(sources: pathlib.Path, level: NativeLevel) -> str:
    """Returns the file name of a library in a wheel. Other sources have another name."""
    return f"{level.name}-{sources_hash(sources)[:16]}.so"


def build_fingerprint(compiler: str, level: NativeLevel, sources: pathlib.Path) -> str:
    """Returns a hash of everything that determines the compiled library."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=10).stdout
    flags = " ".join((*_FLAGS, *level.flags))
    parts = [compiler.encode(), version, flags.encode(), platform.machine().encode(), sources_hash(sources).encode()]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def compile_library(compiler: str, level: NativeLevel, sources: pathlib.Path, path: pathlib.Path) -> None:
    """Builds the library in a temporary folder and moves it to `path`, so no process loads a partial file.

    Raises NativeLibraryError with the compiler's first line, OSError and subprocess.TimeoutExpired.
    """
    flags = (*_FLAGS, *level.flags)
    with tempfile.TemporaryDirectory(dir=path.parent) as workplace:
        files = sorted(sources.glob("*.cpp"))
        if not files:
            raise NativeLibraryError(f"{sources} has no C++ files")
        objects = [pathlib.Path(workplace) / f"{file.stem}.o" for file in files]
        commands = [
            [compiler, *flags, "-I", str(HEADERS), "-c", "-o", str(built), str(file)]
            for built, file in zip(objects, files, strict=True)
        ]
        _run_all(commands)
        built = pathlib.Path(workplace) / path.name
        _run_all([[compiler, *flags, "-shared", "-o", str(built), *map(str, objects)]])
        _seal(built)
        built.replace(path)


def is_intact(path: pathlib.Path) -> bool:
    """Whether a library is as `compile_library` wrote it.

    Loading one that was truncated, or that has zeros where its code was, kills the process. Raises OSError.
    """
    content = path.read_bytes()
    return content[-_HASH_BYTES:] == hashlib.sha256(content[:-_HASH_BYTES]).digest()


def _seal(library: pathlib.Path) -> None:
    """Appends a hash, which the system's loader ignores, and waits until the file is on the disk."""
    with library.open("r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


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
