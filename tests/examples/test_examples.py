"""The programs in `examples/` answer about real pictures, send each file once, and heed what a server says."""

from __future__ import annotations

import pathlib
import socket

import pytest

from lookonce.errors import InvalidInputError, OverloadedError
from lookonce.local.local_stack import LocalStack
from lookonce.testing import FakeServer
from tests.e2e.pictures import QUESTION, fresh
from tests.examples.programs import Program, python_program, typescript_program

_UPLOAD = "it gets the file"


@pytest.fixture(scope="module", params=[python_program, typescript_program], ids=["python", "typescript"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    made: Program = request.param(tmp_path_factory.mktemp("example"))
    return made


@pytest.fixture
def picture(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "picture.png"
    path.write_bytes(b"a FakeServer does not decode images")
    return path


def test_the_answer_is_right_and_the_file_is_sent_once(
    program: Program, stack: LocalStack, tmp_path: pathlib.Path
) -> None:
    (picture,) = fresh(1)
    path = tmp_path / "picture.png"
    path.write_bytes(picture.data)

    first = program.ask(stack.decoder_targets[0], path, QUESTION)
    assert (first.returncode, first.stdout) == (0, f"{picture.answer}\n"), first.stderr
    assert _UPLOAD in first.stderr
    assert "Image rows: 36 encoded," in first.stderr

    second = program.ask(stack.decoder_targets[1], path, QUESTION)
    assert (second.returncode, second.stdout) == (0, f"{picture.answer}\n"), second.stderr
    assert _UPLOAD not in second.stderr
    assert "Image rows: 0 encoded," in second.stderr


def test_a_busy_server_is_asked_again_when_it_says(program: Program, picture: pathlib.Path) -> None:
    with FakeServer("a red square") as server:
        server.fail(OverloadedError("full", retry_after_s=0.25))
        finished = program.ask(server.target, picture, "What is it?")
        assert (finished.returncode, finished.stdout) == (0, "a red square\n"), finished.stderr
        assert "busy: next attempt in 0.25 s" in finished.stderr
        # The digest twice, then the file.
        assert [image.data is not None for request in server.requests for image in request.images] == [
            False,
            False,
            True,
        ]
        assert [image.data for image in server.images.uploads] == [picture.read_bytes()]


def test_a_busy_server_is_busy_again_when_the_file_comes(program: Program, picture: pathlib.Path) -> None:
    calls = []

    def answer(_: object) -> str:
        calls.append(1)
        if len(calls) == 1:
            raise OverloadedError("full", retry_after_s=0.125)
        return "a red square"

    with FakeServer(answer) as server:
        finished = program.ask(server.target, picture, "What is it?")
    assert (finished.returncode, finished.stdout) == (0, "a red square\n"), finished.stderr
    assert "busy: next attempt in 0.125 s" in finished.stderr
    assert len(calls) == 2


def test_no_attempt_is_made_after_the_deadline(program: Program, picture: pathlib.Path) -> None:
    with FakeServer() as server:
        server.fail(OverloadedError("full", retry_after_s=3600))
        finished = program.ask(server.target, picture, "What is it?")
        assert (finished.returncode, finished.stdout) == (1, "")
        assert finished.stderr.splitlines()[-1] == "OVERLOADED: full"
        assert len(server.requests) == 1


def test_an_error_has_the_servers_reason_and_text(program: Program, picture: pathlib.Path) -> None:
    with FakeServer() as server:
        server.fail(InvalidInputError("the question is too odd"))
        finished = program.ask(server.target, picture, "What is it?")
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr == f"{InvalidInputError.reason}: the question is too odd\n"


def test_an_error_of_grpc_has_the_name_of_its_code(program: Program, picture: pathlib.Path) -> None:
    # Bound, and nobody listens.
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        finished = program.ask(f"127.0.0.1:{closed.getsockname()[1]}", picture, "What is it?")
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr.startswith("UNAVAILABLE: ")
