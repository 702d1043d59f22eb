"""`lookonce chat`: turns, pictures, the chat's own commands; on a pipe, and on a terminal."""

from __future__ import annotations

import contextlib
import pathlib
import signal
from collections.abc import Iterator

import pytest

from lookonce.commands.asking.conversation import Conversation
from lookonce.errors import OverloadedError
from lookonce.generation import Message
from lookonce.images import ImageRef
from lookonce.testing import FakeServer
from tests.lookonce.commands.conftest import Command, HeldAnswers
from tests.lookonce.commands.terminal import Terminal


def test_each_line_is_a_turn_with_all_earlier_ones(
    command: Command, server: FakeServer, pictures: pathlib.Path
) -> None:
    lines = ["what is it?", "", f"/image {pictures}/10.png", "and this?", f"'{pictures}/more/a.png'", "and that?"]
    finished = command("chat", "--system", "Be short.", "-i", str(pictures / "2.png"), stdin="\n".join(lines))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "a red square\n" * 3
    first, second, third = server.requests
    assert first.text.splitlines() == ["Be short.", "what is it?"]
    assert second.text.splitlines() == ["Be short.", "what is it?", "a red square", "and this?"]
    assert [len(request.images) for request in (first, second, third)] == [1, 2, 3]
    assert third.images[0] == ImageRef.from_file(pictures / "2.png")
    assert third.images[2] == ImageRef.from_file(pictures / "more/a.png")


def test_commands_of_the_chat_change_what_is_sent(command: Command, server: FakeServer) -> None:
    lines = ["one", "two", "/undo", "/system In verse.", "/history", "three", "/clear", "four", "/exit", "five"]
    finished = command("chat", stdin="\n".join(lines))
    assert finished.returncode == 0, finished.stderr
    texts = [request.text.splitlines() for request in server.requests]
    assert texts[2:] == [["In verse.", "one", "a red square", "three"], ["In verse.", "four"]]
    history = ["system: In verse.", "user: one", "assistant: a red square"]
    assert finished.stdout.splitlines() == ["a red square"] * 2 + history + ["a red square"] * 2


@pytest.mark.parametrize(
    ("line", "words"), [("/nothing", "no command /nothing"), ("/image none.png", "neither a file")]
)
def test_a_wrong_line_from_a_pipe_ends_the_chat(command: Command, server: FakeServer, line: str, words: str) -> None:
    finished = command("chat", stdin=f"{line}\nhello\n")
    assert finished.returncode == 2
    assert words in " ".join(finished.stderr.replace("│", " ").split())
    assert server.requests == []


def test_a_failed_answer_from_a_pipe_ends_the_chat(command: Command, server: FakeServer) -> None:
    server.fail(OverloadedError("full", retry_after_s=1e6))
    finished = command("chat", stdin="one\ntwo\n")
    assert (finished.returncode, finished.stdout) == (1, "")
    assert "full" in finished.stderr


def test_a_question_without_an_answer_is_no_turn() -> None:
    conversation = Conversation(None, [ImageRef.from_bytes(b"x")])
    first = conversation.question("one")
    again = conversation.question("two")
    assert len(again) == 1
    assert len(again[0].content) == 2, "the picture still waits"
    conversation.keep(first, "answer")
    assert conversation.question("two") == [*first, Message("assistant", "answer"), Message("user", ["two"])]
    assert conversation.num_turns == 1
    assert conversation.undo()
    assert not conversation.undo()


@pytest.fixture
def on_terminal(environment: dict[str, str]) -> Iterator[Terminal]:
    with contextlib.closing(Terminal(environment, "chat")) as terminal:
        yield terminal


def test_on_a_terminal_errors_and_ctrl_c_leave_the_chat_running(on_terminal: Terminal, held: HeldAnswers) -> None:
    on_terminal.until("> ")
    on_terminal.write("/image none.png\n")
    on_terminal.until("error: none.png is neither")
    on_terminal.until("> ")
    on_terminal.write("slow\n")
    assert held.asked.wait(60)
    on_terminal.process.send_signal(signal.SIGINT)
    on_terminal.until("stopped")
    on_terminal.until("> ")
    on_terminal.write("fast\n")
    on_terminal.until("a red square")
    on_terminal.until("> ")
    on_terminal.write("\x04")
    assert on_terminal.process.wait(60) == 0


def test_a_terminal_obeys_no_control_characters_of_an_answer(on_terminal: Terminal, command: Command) -> None:
    on_terminal.until("> ")
    for line in ("in colour", "/history"):
        on_terminal.write(f"{line}\n")
        on_terminal.until("a \ufffd[31mred\ufffd thing")
    assert command("generate", "in colour").stdout == "a \x1b[31mred\x07 thing\n", "a pipe has what the model said"


def test_ctrl_c_at_the_prompt_ends_the_chat_quietly(on_terminal: Terminal) -> None:
    on_terminal.until("> ")
    on_terminal.process.send_signal(signal.SIGINT)
    # A signal between the prompt and the wait for a key takes effect with the next key.
    on_terminal.write("\n")
    assert on_terminal.process.wait(60) == 130
