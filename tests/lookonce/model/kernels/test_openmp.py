"""A short-lived thread leaves no OpenMP threads behind, and environment settings of the spin count win."""

from __future__ import annotations

import os
import pathlib
import sys
import time

import pytest
import torch

from lookonce.model.kernels.openmp import run_in_short_lived_thread, set_openmp_spin_count

_TIMEOUT_S = 10.0


def num_threads() -> int:
    return len(list(pathlib.Path("/proc/self/task").iterdir()))


def compute() -> int:
    """Computes on an OpenMP team; returns the number of threads of the process meanwhile."""
    torch.ones(1 << 22).sum()
    return num_threads()


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_the_team_of_a_short_lived_thread_ends_with_it() -> None:
    usual = torch.get_num_threads()
    try:
        # Starts threads of another kind, which stay.
        torch.set_num_threads(3)
        before = num_threads()
        # The thread itself and two more of its team.
        assert run_in_short_lived_thread(compute) == before + 3
        deadline_s = time.monotonic() + _TIMEOUT_S
        while num_threads() > before and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert num_threads() == before
    finally:
        torch.set_num_threads(usual)


def test_an_error_of_the_work_is_raised_to_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        run_in_short_lived_thread(lambda: 1 // 0)


@pytest.mark.parametrize(
    ("told", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_the_spin_count_is_set_unless_the_environment_sets_waiting(
    told: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        # Set first, so that monkeypatch restores the variable.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    set_openmp_spin_count()
    assert os.environ.get("GOMP_SPINCOUNT") == expected
