"""The faster implementation is used, and a machine is timed once."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable

import pytest
import torch

from lookonce.model.kernels import kernel_trial
from lookonce.model.kernels.kernel_choice import NATIVE, PYTORCH, KernelChoice
from lookonce.model.kernels.kernel_trial import Candidate, choose_kernel, kernel_choices
from lookonce.model.kernels.native_compiler import NativeLibraryError
from lookonce.model.kernels.native_library import cache_folder, trusted_cache_folder
from lookonce.model.kernels.native_linear import SOURCES


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """A process that has chosen nothing yet, on a machine without a trial."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_trial, "_choices", {})


class Timed:
    """A candidate that computes for some milliseconds, and counts its preparations."""

    def __init__(self, milliseconds: float) -> None:
        self.seconds = milliseconds / 1e3
        self.num_prepared = 0

    def __call__(self) -> Candidate:
        self.num_prepared += 1
        return self._run

    def _run(self) -> None:
        assert torch.get_num_threads() == 1
        until_s = time.thread_time() + self.seconds
        while time.thread_time() < until_s:
            pass


def chosen(candidates: dict[str, Callable[[], Candidate]]) -> KernelChoice:
    return choose_kernel("test", SOURCES, candidates)


def forget_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts the next process, so to speak."""
    monkeypatch.setattr(kernel_trial, "_choices", {})


@pytest.mark.parametrize(("native_ms", "expected"), [(1.0, NATIVE), (4.0, NATIVE), (8.0, PYTORCH)])
def test_ours_is_used_unless_pytorchs_is_clearly_faster(native_ms: float, expected: str) -> None:
    num_threads = torch.get_num_threads()
    choice = chosen({NATIVE: Timed(native_ms), PYTORCH: Timed(4.0)})
    assert choice.implementation == expected
    assert choice.speed_ratio == choice.seconds[PYTORCH] / choice.seconds[expected]
    assert kernel_choices() == (choice,)
    assert torch.get_num_threads() == num_threads


def test_the_fastest_of_three_is_used() -> None:
    assert chosen({"onednn": Timed(4), NATIVE: Timed(1), PYTORCH: Timed(8)}).implementation == NATIVE


def test_an_implementation_that_cannot_run_is_left_out() -> None:
    def impossible() -> Candidate:
        raise NativeLibraryError("no compiler")

    choice = chosen({NATIVE: impossible, PYTORCH: Timed(1)})
    assert (choice.implementation, list(choice.seconds), choice.speed_ratio) == (PYTORCH, [PYTORCH], 1.0)


def test_a_machine_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    native, pytorch = Timed(1), Timed(4)
    first = chosen({NATIVE: native, PYTORCH: pytorch})
    assert chosen({NATIVE: native, PYTORCH: pytorch}) is first
    forget_choices(monkeypatch)
    assert chosen({NATIVE: native, PYTORCH: pytorch}) == first
    # The winner is prepared once more, to see that it still can run.
    assert (native.num_prepared, pytorch.num_prepared) == (2, 1)


def test_close_times_are_taken_again_by_the_next_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy moment may hide that one is faster, and no number of starts may go on with trials for ever."""
    native, pytorch = Timed(5), Timed(4.6)
    assert chosen({NATIVE: native, PYTORCH: pytorch}).implementation == NATIVE
    native.seconds, pytorch.seconds = 0.005, 0.003
    forget_choices(monkeypatch)
    assert chosen({NATIVE: native, PYTORCH: pytorch}).implementation == PYTORCH
    # These times are not close any more; the shortest of each counts.
    pytorch.seconds = 0.009
    forget_choices(monkeypatch)
    assert chosen({NATIVE: native, PYTORCH: pytorch}).implementation == PYTORCH
    # Two trials, and a look before the second one whether the winner of the first still can run.
    assert native.num_prepared == 3

    one, other = Timed(3), Timed(3)
    for number in (1, 2, 3, 3, 3):
        forget_choices(monkeypatch)
        choose_kernel("other test", SOURCES, {NATIVE: one, PYTORCH: other})
        assert other.num_prepared == number


def test_a_winner_that_can_no_longer_run_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    def impossible() -> Candidate:
        raise NativeLibraryError("the compiler is gone")

    chosen({NATIVE: Timed(1), PYTORCH: Timed(4)})
    forget_choices(monkeypatch)
    assert chosen({NATIVE: impossible, PYTORCH: Timed(4)}).implementation == PYTORCH


def test_an_implementation_that_could_not_run_is_timed_when_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start before the compiler was installed, or whose compiler was killed, kept our kernels away for ever."""

    def impossible() -> Candidate:
        raise NativeLibraryError("the compiler was killed")

    pytorch = Timed(4)
    for number in (1, 2):
        forget_choices(monkeypatch)
        assert chosen({NATIVE: impossible, PYTORCH: pytorch}).implementation == PYTORCH
        assert pytorch.num_prepared == number, "while it cannot run, the times of the others hold"
    forget_choices(monkeypatch)
    assert chosen({NATIVE: Timed(1), PYTORCH: pytorch}).implementation == NATIVE


@pytest.mark.parametrize("name", ["CXX", "ONEDNN_MAX_CPU_ISA"])
def test_another_compiler_or_limit_of_instructions_is_timed_anew(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    other = tmp_path / "other-c++"
    other.write_text("#!/bin/sh\necho another compiler\n")
    other.chmod(0o700)
    candidates = {NATIVE: Timed(1), PYTORCH: Timed(2)}
    chosen({**candidates})
    monkeypatch.setenv(name, str(other))
    forget_choices(monkeypatch)
    chosen({**candidates})
    assert candidates[PYTORCH].num_prepared == 2


def test_a_full_disk_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(pathlib.Path, "replace", fail)
    assert chosen({NATIVE: Timed(1), PYTORCH: Timed(2)}).implementation == NATIVE
    assert list(cache_folder().iterdir()) == []


def test_another_pytorch_or_level_is_timed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = {NATIVE: Timed(1), PYTORCH: Timed(2)}
    chosen({**candidates})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ANOTHER")
    forget_choices(monkeypatch)
    chosen({**candidates})
    monkeypatch.setenv("LOOKONCE_NATIVE_LEVEL", "x86_64")
    forget_choices(monkeypatch)
    chosen({**candidates})
    assert candidates[NATIVE].num_prepared == 3


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"pytorch": 1.0}',
        '{"seconds": {"native": 1.0}, "num_trials": 1}',
        '{"seconds": {"native": -1.0, "pytorch": 1.0}, "num_trials": 1}',
        '{"seconds": {"pytorch": "1"}, "num_trials": 1}',
        '{"seconds": {"native": 9.0, "pytorch": 1.0}, "num_trials": 0}',
        '{"seconds": {"native": 9.0, "pytorch": 1.0}, "num_trials": "1"}',
        '{"seconds": 1, "num_trials": 1}',
    ],
)
def test_a_damaged_file_is_replaced(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = {NATIVE: Timed(1), PYTORCH: Timed(2)}
    chosen({**candidates})
    (file,) = cache_folder().glob("trial-*.json")
    file.write_text(content)
    forget_choices(monkeypatch)
    assert chosen({**candidates}).implementation == NATIVE
    assert set(json.loads(file.read_text())["seconds"]) == {NATIVE, PYTORCH}
    assert file.stat().st_mode & 0o022 == 0


def test_without_a_safe_folder_every_process_makes_its_own_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trusted_cache_folder()
    folder.chmod(0o777)
    candidates = {NATIVE: Timed(1), PYTORCH: Timed(2)}
    for number in (1, 2):
        forget_choices(monkeypatch)
        assert chosen({**candidates}).implementation == NATIVE
        assert candidates[NATIVE].num_prepared == number
    assert list(folder.iterdir()) == []
