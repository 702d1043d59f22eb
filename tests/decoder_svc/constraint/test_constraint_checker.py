"""Tests that no constraint harms the process that asks about it, and that outcomes are remembered."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from decoder_svc.constraint import constraint_checker
from decoder_svc.constraint.constraint_checker import ConstraintChecker
from decoder_svc.constraint.constraint_process import ConstraintProcess
from decoder_svc.constraint.frames import Vocabulary
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind
from lookonce.errors import InvalidParameterError, UnavailableError, UnsupportedError
from lookonce.process.limited_process import LimitedProcess
from lookonce.process.process_clock import TimeLimits
from tests.decoder_svc.constraint.demo_constraints import demo_vocabulary

GOOD = Constraint(ConstraintKind.REGEX, "[0-9]{2}")


def schema(value: Any) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(value))


def chain(length: int) -> Constraint:
    """References in a row, each of which takes a piece of the stack."""
    parts: dict[str, Any] = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(length)}
    return schema({"$defs": {**parts, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"})


def slow() -> Constraint:
    names = [f"^{'ab'[number % 2]}{{1,{number % 40 + 1}}}[a-z]*{number}$" for number in range(800)]
    return schema({"type": "object", "patternProperties": {name: {"type": "string"} for name in names}})


@pytest.fixture
def checker() -> Iterator[ConstraintChecker]:
    checker = ConstraintChecker(demo_vocabulary)
    yield checker
    checker.close()


def wait_until_it_computes(process: psutil.Process) -> None:
    began_s = process.cpu_times().user
    while process.cpu_times().user < began_s + 0.2:
        time.sleep(0.01)


def pid_of(checker: ConstraintChecker) -> int:
    assert checker._process is not None
    return checker._process.pid


def test_a_refusal_has_its_field_and_reason_and_is_remembered(checker: ConstraintChecker) -> None:
    bad = Constraint(ConstraintKind.REGEX, "a(b")
    for _ in range(2):
        with pytest.raises(InvalidParameterError, match="unclosed group") as caught:
            checker.check(bad)
        assert caught.value.field == "sampling.regex"
    checker.check(GOOD)
    # Both are known: no process is needed.
    os.kill(pid_of(checker), signal.SIGKILL)
    before = pid_of(checker)
    checker.check(GOOD)
    assert checker.is_served(GOOD)
    assert not checker.is_served(bad)
    assert not checker.is_served(Constraint(ConstraintKind.REGEX, "other"))
    assert pid_of(checker) == before


def test_a_constraint_that_ends_its_process_is_refused_and_others_are_served(checker: ConstraintChecker) -> None:
    checker.check(GOOD)
    with pytest.raises(InvalidParameterError, match="nested too deeply"):
        checker.check(chain(3500))
    with pytest.raises(InvalidParameterError, match="nested too deeply"):
        checker.check(chain(3500))
    checker.check(chain(20))
    checker.check(Constraint(ConstraintKind.REGEX, "[a-z]{3}"))


def test_a_constraint_that_takes_long_is_refused(checker: ConstraintChecker) -> None:
    checker._time_limits = TimeLimits(cpu_s=0.3, wall_s=60.0)
    with pytest.raises(InvalidParameterError, match=r"more than 0\.3 s of processor time"):
        checker.check(slow())
    checker.check(GOOD)


def stop(pid: int) -> None:
    """Stops a process, which goes on for a moment after it was told to."""
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)


def test_a_process_without_processor_time_is_not_the_constraints_fault(checker: ConstraintChecker) -> None:
    checker.check(GOOD)
    checker._time_limits = TimeLimits(cpu_s=60.0, wall_s=0.2)
    stop(pid_of(checker))
    other = Constraint(ConstraintKind.REGEX, "other")
    with pytest.raises(UnavailableError, match="too busy"):
        checker.check(other)
    checker._time_limits = constraint_checker.TIME_LIMITS
    checker.check(other)


def test_a_process_that_is_killed_from_outside_is_replaced(checker: ConstraintChecker) -> None:
    checker.check(GOOD)
    pid = pid_of(checker)
    os.kill(pid, signal.SIGKILL)
    checker.check(Constraint(ConstraintKind.REGEX, "x"))
    assert pid_of(checker) != pid
    # While it is asked: it is stopped, gets the question, and is killed.
    pid = pid_of(checker)
    stop(pid)
    killer = threading.Timer(0.3, os.kill, [pid, signal.SIGKILL])
    killer.start()
    checker.check(Constraint(ConstraintKind.REGEX, "y"))
    killer.join()
    assert pid_of(checker) != pid


def test_a_process_ends_when_its_owner_does_whatever_it_computes(checker: ConstraintChecker) -> None:
    checker._time_limits = TimeLimits(cpu_s=600.0, wall_s=600.0)
    checker.check(GOOD)
    process = psutil.Process(pid_of(checker))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(checker.check, slow())
        wait_until_it_computes(process)
        assert checker._process is not None
        checker._is_closed = True
        # The socket is closed and nobody kills the process, like when its owner ends.
        checker._process._process.sockets[0].close()
        assert waiting.exception(10) is not None
    assert checker._process is None


def test_who_waits_while_the_checker_is_closed_gets_an_answer(checker: ConstraintChecker) -> None:
    checker._time_limits = TimeLimits(cpu_s=600.0, wall_s=600.0)
    checker.check(GOOD)
    process = psutil.Process(pid_of(checker))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(checker.check, slow())
        wait_until_it_computes(process)
        checker.close()
        assert isinstance(waiting.exception(10), UnavailableError)
    assert not process.is_running()


def test_the_latest_outcomes_are_kept(checker: ConstraintChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_checker, "_MAX_KNOWN", 3)
    monkeypatch.setattr(constraint_checker, "_MAX_KNOWN_CHARS", 40)
    for text in ("a", "b", "c", "a", "d"):
        checker.check(Constraint(ConstraintKind.REGEX, text))
    assert [constraint.text for constraint in checker._known] == ["c", "a", "d"]
    for length in (39, 41):
        checker.check(Constraint(ConstraintKind.REGEX, "e" * length))
    assert [len(constraint.text) for constraint in checker._known] == [41]
    assert checker._known_chars == 41


def test_many_threads_get_the_same_outcomes(checker: ConstraintChecker) -> None:
    asked = [Constraint(ConstraintKind.REGEX, f"a{{{number % 7}}}" if number % 3 else "(") for number in range(60)]

    def outcome(constraint: Constraint) -> bool:
        try:
            checker.check(constraint)
        except InvalidParameterError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(outcome, asked)) == [constraint.text != "(" for constraint in asked]


def test_a_tokenizer_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = demo_vocabulary()
    state = json.loads(vocabulary.tokenizer_json)
    state["decoder"] = None
    state["pre_tokenizer"] = None
    checker = ConstraintChecker(lambda: Vocabulary(json.dumps(state), vocabulary.end_token_id))
    with pytest.raises(UnsupportedError, match="tokenizer cannot be used for structured output"):
        checker.check(GOOD)
    checker.close()


def test_the_process_sees_no_secret_and_no_model(checker: ConstraintChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKONCE_REDIS_URL", "redis://:secret@somewhere")
    checker.check(GOOD)
    process = psutil.Process(pid_of(checker))
    assert "LOOKONCE_REDIS_URL" not in process.environ()
    loaded = {os.path.basename(mapped.path) for mapped in process.memory_maps()}
    assert not any("torch" in name for name in loaded)


@pytest.fixture
def kills_to_come(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Signals for the processes that are started next, in their order."""
    original = LimitedProcess._wait_until_ready
    signals: list[int] = []

    def killed(process: LimitedProcess) -> None:
        if signals:
            os.kill(process.pid, signals.pop(0))
        original(process)

    with monkeypatch.context() as patch:
        patch.setattr(LimitedProcess, "_wait_until_ready", killed)
        yield signals


def test_a_process_that_is_killed_while_it_starts_is_started_again(
    checker: ConstraintChecker, kills_to_come: list[int]
) -> None:
    kills_to_come += [signal.SIGKILL, signal.SIGTERM]
    checker.check(GOOD)
    assert kills_to_come == []


def test_processes_that_are_always_killed_while_they_start_are_a_reason_to_try_again(
    checker: ConstraintChecker, kills_to_come: list[int]
) -> None:
    kills_to_come += [signal.SIGKILL] * 3
    with pytest.raises(UnavailableError, match="compiles constraints was killed from outside; try again"):
        checker.check(GOOD)
    checker.check(GOOD)


def test_a_constraint_is_compiled_though_two_processes_are_killed_meanwhile(
    checker: ConstraintChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, kills = ConstraintProcess.check, [signal.SIGKILL, signal.SIGKILL]

    def killed(process: ConstraintProcess, *arguments: Any) -> str | None:
        if kills:
            os.kill(process.pid, kills.pop())
        return original(process, *arguments)

    monkeypatch.setattr(ConstraintProcess, "check", killed)
    checker.check(GOOD)
    assert kills == []
