"""A process for hostile input: how it starts, and what it gets from the service."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import textwrap

import pytest

from lookonce.errors import InternalError
from lookonce.process.exact_receive import receive
from lookonce.process.limited_process import LimitedProcess

_MEMORY_BYTES = 1 << 30
_SIDE = """
    import json, os, sys
    import a_neighbour
    from lookonce.process.limited_side import limited_side
    if __name__ == "__main__":
        with limited_side(sys.argv[1], int(sys.argv[2])) as (connection,):
            seen = {"argv": sys.argv[2:], "environment": dict(os.environ), "path": sys.path}
            connection.sendall(json.dumps(seen).encode().ljust(65536))
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder with a program, which only the search path of this process names."""
    (tmp_path / "a_side.py").write_text(textwrap.dedent(_SIDE), "utf-8")
    (tmp_path / "a_neighbour.py").write_text("", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_program_is_found_where_this_process_finds_it_and_sees_no_secret(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOKONCE_ADMIN_TOKEN", "a secret")
    monkeypatch.setattr(sys, "path", ["", ".", *sys.path])
    process = LimitedProcess("tests", "a_side", [_MEMORY_BYTES, "an argument"])
    try:
        seen = json.loads(receive(process.sockets[0], 65536, lambda: 30.0))
    finally:
        process.close()
    assert seen["argv"] == [str(_MEMORY_BYTES), "an argument"]
    # The interpreter sets this one itself in the C locale (PEP 538).
    assert set(seen["environment"]) <= {"LC_CTYPE"}
    assert str(folder) in seen["path"]
    assert all(os.path.isabs(each) for each in seen["path"])


def test_a_program_that_is_nowhere_is_an_error() -> None:
    with pytest.raises(InternalError, match="a process that tests did not start"):
        LimitedProcess("tests", "no_such_side", [_MEMORY_BYTES])
