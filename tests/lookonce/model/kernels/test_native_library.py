"""A folder of C++ files is compiled once per machine, or an error gives the reason."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from lookonce.model.kernels.native_compiler import NativeLibraryError, find_compiler, is_intact
from lookonce.model.kernels.native_library import library_of_level, load_library

SOURCE = """
#include "lanes.h"
#pragma GCC visibility push(default)
extern "C" void write_number(float* to) { *to = lookonce::sum_of_lanes(lookonce::Floats(%s)); }
"""
# Without the headers, which take a second to compile.
SHORT_SOURCE = """
extern "C" __attribute__((visibility("default"))) void write_number(float* to) { *to = 16 * %s; }
"""

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("c++") is None, reason="there is no C++ compiler here"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """Sets and returns an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library_of_level.cache_clear()
    yield tmp_path / "cache/lookonce"
    library_of_level.cache_clear()


def sources(folder: pathlib.Path, number: str, source: str = SHORT_SOURCE) -> pathlib.Path:
    """Returns a folder with a C++ function that writes 16 · `number`."""
    folder.mkdir(exist_ok=True)
    (folder / "number.cpp").write_text(source % number)
    return folder


def written(folder: pathlib.Path) -> float:
    number = ctypes.c_float()
    load_library(folder).function("write_number")(ctypes.byref(number))
    return number.value


def test_a_folder_is_compiled_with_the_shared_headers_once_and_anew_when_it_changes(
    tmp_path: pathlib.Path, cache: pathlib.Path
) -> None:
    folder = sources(tmp_path / "sources", "0.5f", SOURCE)
    assert written(folder) == 8.0
    (library,) = cache.iterdir()
    built_s = library.stat().st_mtime_ns
    library_of_level.cache_clear()
    assert written(folder) == 8.0
    assert library.stat().st_mtime_ns == built_s
    sources(folder, "2.0f", SOURCE)
    library_of_level.cache_clear()
    assert written(folder) == 32.0


def cut(content: bytes, share: float) -> bytes:
    return content[: int(share * len(content))]


@pytest.mark.parametrize(
    "damage",
    [
        *(functools.partial(cut, share=share) for share in (0.0, 0.01, 0.5, 0.99)),
        lambda content: content[:4096] + bytes(len(content) - 4096),
        lambda content: content + b"x",
    ],
    ids=["empty", "1 %", "half", "99 %", "zeros", "longer"],
)
def test_a_damaged_library_is_compiled_again(
    tmp_path: pathlib.Path, cache: pathlib.Path, damage: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading half of a library killed the process, again at each start."""
    folder = sources(tmp_path / "sources", "0.5f")
    assert written(folder) == 8.0
    (library,) = cache.iterdir()
    # In another cache, because this process would reuse the library that it has loaded from a path.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    library_of_level.cache_clear()
    damaged = tmp_path / "other/lookonce" / library.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(damage(library.read_bytes()))
    assert written(folder) == 8.0
    assert is_intact(damaged)


def test_two_folders_in_one_process_keep_their_own_functions(tmp_path: pathlib.Path) -> None:
    one, other = sources(tmp_path / "one", "1.0f"), sources(tmp_path / "other", "3.0f")
    assert (written(one), written(other), written(one)) == (16.0, 48.0, 16.0)


def test_of_processes_that_start_together_one_compiles_and_all_get_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, compiler, log = sources(tmp_path / "sources", "1.0f"), tmp_path / "slow-c++", tmp_path / "log"
    # Slow enough that the second process asks before the first is done.
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*) echo >>"{log}"; sleep 1 ;; esac\nexec {find_compiler()} "$@"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    script = (
        "import pathlib, sys; from lookonce.model.kernels.native_library import load_library; print('ready'); input(); "
        "print(load_library(pathlib.Path(sys.argv[1])).function('write_number').__name__)"
    )
    # The other process is this one. It begins when the imports of the first are done.
    command = [sys.executable, "-u", "-c", script, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("\n")
        process.stdin.flush()
        assert written(folder) == 16.0
        assert process.communicate(timeout=120)[0] == "write_number\n"
    assert log.read_text() == "\n"


def test_a_failing_compiler_is_reported_with_its_first_line(
    tmp_path: pathlib.Path, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "broken-c++"
    compiler.write_text("#!/bin/sh\necho 'no such language' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeLibraryError, match="no such language"):
        load_library(sources(tmp_path / "sources", "1.0f"))
    assert not list(cache.iterdir()), "nothing half-made is left"


def test_a_missing_compiler_is_reported(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(NativeLibraryError, match="no C\\+\\+ compiler"):
        load_library(sources(tmp_path / "sources", "1.0f"))


def test_a_library_from_a_folder_that_others_can_write_is_not_loaded(
    tmp_path: pathlib.Path, cache: pathlib.Path
) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(NativeLibraryError, match="must not be writable for others"):
        load_library(sources(tmp_path / "sources", "1.0f"))


def test_without_a_writable_cache_there_is_no_library(tmp_path: pathlib.Path, cache: pathlib.Path) -> None:
    cache.parent.write_text("no folder")
    with pytest.raises(NativeLibraryError, match="could not be compiled"):
        load_library(sources(tmp_path / "sources", "1.0f"))


def test_a_folder_without_sources_makes_no_library(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sources").mkdir()
    with pytest.raises(NativeLibraryError, match=r"has no C\+\+ files"):
        load_library(tmp_path / "sources")
