"""A command finds its services: an argument goes before the environment, and that before the running `lookonce up`."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import pytest

from lookonce.commands.targets import admin_target, decoder_target, running_stack
from lookonce.errors import ConfigurationError
from lookonce.local.cli_settings import CliSettings, StackRecord

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
    record = StackRecord("decoder:1", "encoder:2", os.getpid(), "admin:3")
    record.write(CliSettings().record_dir)
    assert running_stack() == record
    assert target(None) == running
    monkeypatch.setenv(variable, "environment:4")
    assert target(None) == "environment:4"
    assert target("argument:5") == "argument:5"


def test_a_stack_without_operators_calls_is_no_target_of_them() -> None:
    StackRecord("decoder:1", "encoder:2", os.getpid()).write(CliSettings().record_dir)
    assert decoder_target(None) == "decoder:1"
    with pytest.raises(ConfigurationError, match="operators' calls"):
        admin_target(None)
