"""Threads share the loops of a region: every item once, in order of phases, without waiting for a late thread."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from lookonce.model.kernels.native_compiler import HEADERS, NativeLibraryError, find_compiler

PROGRAM = pathlib.Path(__file__).with_name("native") / "phases_checks.cpp"
_TIMEOUT_S = 600


@pytest.mark.parametrize("flags", [("-O2",), ("-O1", "-g", "-fsanitize=thread")], ids=["fast", "thread-sanitizer"])
def test_every_item_is_done_once_and_no_phase_begins_too_early(flags: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    try:
        compiler = find_compiler()
    except NativeLibraryError:
        pytest.skip("there is no C++ compiler here")
    program = tmp_path / "checks"
    command = [compiler, "-std=c++17", "-fopenmp", *flags, f"-I{HEADERS}", "-o", str(program), str(PROGRAM)]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    assert compiled.returncode == 0, compiled.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("0 checks failed\n", "", 0)
