"""The records of running stacks: who finds them, who may write them, and what is done with damaged ones."""

from __future__ import annotations

import json
import os
import pathlib
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lookonce.errors import ConfigurationError
from lookonce.local.stack_record import StackRecord, only_stack, running_stacks

RECORD = StackRecord(os.getpid(), ("a:1", "a:2"), ("a:3",), "a:4", ("a:5", "a:6"), ("a:7",))


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until the end of the test."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_running_stack_is_found_until_it_removes_its_record(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "lookonce"
    assert running_stacks(directory) == []
    RECORD.write(directory)
    assert running_stacks(directory) == [RECORD]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    RECORD.remove(directory)
    assert list(directory.iterdir()) == []


def test_stacks_side_by_side_do_not_hide_each_other(
    tmp_path: pathlib.Path, other_process: subprocess.Popen[bytes]
) -> None:
    other = replace(RECORD, pid=other_process.pid, decoders=("b:1",))
    other.write(tmp_path / "lookonce")
    RECORD.write(tmp_path / "lookonce")
    found = running_stacks(tmp_path / "lookonce")
    assert sorted(record.pid for record in found) == sorted([RECORD.pid, other.pid])
    with pytest.raises(ConfigurationError) as caught:
        only_stack(found)
    for record in found:
        assert f"decoder at {record.decoders[0]} (process {record.pid})" in caught.value.message
    assert "--target" in caught.value.message
    RECORD.remove(tmp_path / "lookonce")
    assert only_stack(running_stacks(tmp_path / "lookonce")) == other
    assert only_stack([]) is None


def test_the_record_of_a_stack_that_died_is_not_used_and_is_removed_by_the_next(tmp_path: pathlib.Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    replace(RECORD, pid=process.pid).write(tmp_path / "lookonce")
    assert running_stacks(tmp_path / "lookonce") == []
    RECORD.write(tmp_path / "lookonce")
    assert len(list((tmp_path / "lookonce").iterdir())) == 1


def test_a_record_that_others_could_have_written_is_refused(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "lookonce"
    RECORD.write(directory)
    directory.chmod(0o777)
    with pytest.raises(ConfigurationError, match="only this user"):
        running_stacks(directory)


def test_a_record_behind_a_link_of_another_folder_is_refused(tmp_path: pathlib.Path) -> None:
    RECORD.write(tmp_path / "elsewhere")
    (tmp_path / "lookonce").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="only this user"):
        running_stacks(tmp_path / "lookonce")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", json.dumps({"pid": 1, "decoders": []})])
def test_a_damaged_record_is_refused(tmp_path: pathlib.Path, content: str) -> None:
    RECORD.write(tmp_path / "lookonce")
    (path,) = (tmp_path / "lookonce").iterdir()
    path.write_text(content)
    with pytest.raises(ConfigurationError, match="is damaged; remove it"):
        running_stacks(tmp_path / "lookonce")
