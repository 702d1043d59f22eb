"""A change of watched files takes effect within two seconds, completely or not at all."""

from __future__ import annotations

import os
import pathlib

import pytest

from lookonce.errors import ConfigurationError
from lookonce.server import watched_files
from lookonce.server.watched_files import WatchedFiles


def number(content: bytes) -> int:
    try:
        return int(content)
    except ValueError:
        raise ValueError("holds no number") from None


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "_LOOK_S", 0.0)


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "number"
    path.write_text("1")
    return path


def test_a_changed_file_is_read_again(path: pathlib.Path) -> None:
    watched = WatchedFiles("setting", (path,), number)
    assert watched.value == 1
    path.write_text("22")
    assert watched.value == 22


def test_a_replacement_with_the_same_time_of_change_is_read(path: pathlib.Path) -> None:
    watched = WatchedFiles("setting", (path,), number)
    other = path.with_name("other")
    other.write_text("2")
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)
    assert watched.value == 2


@pytest.mark.parametrize("content", [b"", b"two", None])
def test_invalid_content_leaves_the_last_value(path: pathlib.Path, content: bytes | None) -> None:
    watched = WatchedFiles("setting", (path,), number)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert watched.value == 1
    path.write_text("3")
    assert watched.value == 3


def test_a_file_that_does_not_change_is_read_once(path: pathlib.Path) -> None:
    contents: list[bytes] = []
    watched = WatchedFiles("setting", (path,), contents.append)
    for _ in range(3):
        assert watched.value is None
    assert contents == [b"1"]


def test_files_that_belong_together_are_read_together(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = tmp_path / "other"
    other.write_text("10")
    watched = WatchedFiles("setting", (path, other), lambda one, two: number(one) + number(two))
    assert watched.value == 11
    other.write_text("200")
    assert watched.value == 201


def test_invalid_files_at_the_start_are_refused(path: pathlib.Path) -> None:
    path.write_text("one")
    with pytest.raises(ConfigurationError, match=r"setting: .*holds no number"):
        WatchedFiles("setting", (path,), number)
    path.unlink()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        WatchedFiles("setting", (path,), number)
