"""Runs the tests in two parts, the second one also after failures in the first, and prints one summary.

`make test` calls it. Arguments that it does not know go to pytest in both parts.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_OK, _INTERRUPTED, _NO_TESTS = 0, 2, 5


@dataclass(frozen=True, slots=True)
class Part:
    """Tests that run in one pytest process, or in one and its workers."""

    name: str
    # Value of pytest's `-m`.
    marks: str
    is_parallel: bool


# Deadlines or speed are part of the marked tests, so each of them has the machine to itself.
PARTS = (Part("in parallel", "not services and not image", True), Part("one at a time", "services", False))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one part, as pytest reported it."""

    name: str
    # pytest's exit status.
    status: int
    seconds: float
    num_passed: int
    num_skipped: int
    # "module::test" of each failure and error.
    failed: tuple[str, ...]
    # Number of skipped tests by reason.
    skips: Counter[str]

    @property
    def is_good(self) -> bool:
        """True if nothing failed; a part without tests is good."""
        return self.status in (_OK, _NO_TESTS)


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if nothing failed in any part, else pytest's exit status of the first part that is not good."""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__, allow_abbrev=False)
    parser.add_argument("--jobs", default="3", help="processes of the parallel part; 0 runs it in pytest's own")
    known, for_pytest = parser.parse_known_args(arguments)
    outcomes: list[Outcome] = []
    for part in PARTS:
        outcomes.append(run_part(part, known.jobs, for_pytest))
        if outcomes[-1].status == _INTERRUPTED:
            break
    print(summary(outcomes), flush=True)
    return next((outcome.status for outcome in outcomes if not outcome.is_good), _OK)


def run_part(part: Part, jobs: str, for_pytest: Sequence[str]) -> Outcome:
    """Runs one part; pytest prints its own report meanwhile."""
    with tempfile.TemporaryDirectory(prefix="lookonce-tests-") as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "-m", part.marks]
        if part.is_parallel:
            # In the order of collection, see tests/conftest.py.
            command += ["--numprocesses", jobs, "--dist", "loadfile", "--no-loadscope-reorder"]
        started_s = time.monotonic()
        process = subprocess.Popen([*command, *for_pytest], env=_environment())
        try:
            status = process.wait()
        except KeyboardInterrupt:
            # The terminal has interrupted pytest, too, which still tears down its fixtures.
            process.wait()
            status = _INTERRUPTED
        seconds = time.monotonic() - started_s
        return _outcome(part.name, status, seconds, report)


def _environment() -> dict[str, str]:
    """Lets Python keep the modules that it compiles, as it does by default; git ignores them.

    The tests start hundreds of processes. Where each compiles the repository's modules again, collecting the tests
    takes 14 instead of 7 s of CPU, and the start of a service 4.6 instead of 4.1 s (2 × AMD EPYC, 2026-11-23).
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _outcome(name: str, status: int, seconds: float, report: pathlib.Path) -> Outcome:
    """Reads pytest's JUnit file. It does not exist after a usage error or a crash of pytest itself."""
    failed: list[str] = []
    skips: Counter[str] = Counter()
    num_tests = 0
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        num_tests += 1
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif skipped is not None:
            skips[skipped.get("message", "")] += 1
    num_skipped = skips.total()
    return Outcome(name, status, seconds, num_tests - len(failed) - num_skipped, num_skipped, tuple(failed), skips)


def summary(outcomes: Sequence[Outcome]) -> str:
    """A line per failure, per reason to skip and per part, and one with the total."""
    skips = sum((outcome.skips for outcome in outcomes), Counter[str]())
    lines = ["", *(f"skipped {number:3}: {reason}" for reason, number in skips.most_common())]
    lines += [f"failed: {test}" for outcome in outcomes for test in outcome.failed]
    lines += [
        f"{outcome.name}: pytest ended with exit status {outcome.status}"
        for outcome in outcomes
        if not outcome.is_good and not outcome.failed
    ]
    lines.append(f"{'':15}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    rows = [(one.name, one.num_passed, len(one.failed), one.num_skipped, one.seconds) for one in outcomes]
    columns = list(zip(*rows, strict=True))[1:]
    rows.append(("total", *(sum(column) for column in columns)))
    lines += [
        f"{name:15}{passed:8}{failed:8}{skipped:9}{seconds:9.0f}" for name, passed, failed, skipped, seconds in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
