"""A command finds its services: an argument goes before the environment, and that before the running `lookonce up`."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import pytest

from lookonce.commands.targets import admin_target, decoder_admin_targets, decoder_target, stacks
from lookonce.errors import ConfigurationError
from lookonce.local.cli_settings import CliSettings
from lookonce.local.stack_record import StackRecord

TARGETS = [(decoder_target, "LOOKONCE_TARGET", "decoder:1"), (admin_target, "LOOKONCE_ADMIN_TARGET", "admin:3")]


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    for _, variable, _ in TARGETS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.mark.parametrize(("target", "variable", "running"), TARGETS)
def test_the_nearest_target_counts(
    target: Callable[[str | None], str], variable: str, running: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="lookonce up"):
        target(None)
    record = StackRecord(os.getpid(), ("decoder:1", "decoder:9"), ("encoder:2",), "admin:3", (), ())
    record.write(CliSettings().record_dir)
    assert stacks() == [record]
    assert target(None) == running
    monkeypatch.setenv(variable, "environment:4")
    assert target(None) == "environment:4"
    assert target("argument:5") == "argument:5"


def test_with_several_stacks_a_target_must_be_given() -> None:
    for pid in (os.getpid(), os.getppid()):
        StackRecord(pid, ("decoder:1",), ("encoder:2",), "admin:3", (), ()).write(CliSettings().record_dir)
    for target in (decoder_target, admin_target):
        with pytest.raises(ConfigurationError, match=r"2 `lookonce up` are running"):
            target(None)
        assert target("argument:5") == "argument:5"


def test_operators_calls_of_decoders_are_those_of_all_decoders_of_the_stack() -> None:
    with pytest.raises(ConfigurationError, match="lookonce up"):
        decoder_admin_targets(None)
    record = StackRecord(os.getpid(), ("a:1", "b:1"), ("c:1",), "c:2", (), (), ("a:2", "b:2"))
    record.write(CliSettings().record_dir)
    assert stacks() == [record]
    assert decoder_admin_targets(None) == ("a:2", "b:2")
    assert decoder_admin_targets("d:2") == ["d:2"]
