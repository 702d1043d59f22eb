"""`lookonce chat`: talks with the model turn by turn. A line that begins with / is a command to the chat itself."""

from __future__ import annotations

import contextlib
import pathlib
import sys

import typer

from lookonce.client import Client
from lookonce.commands.asking.answers import stream_text
from lookonce.commands.asking.conversation import Conversation
from lookonce.commands.asking.sampling import takes_sampling, with_flag
from lookonce.commands.options import ImageNames, MaxPixels, System, Target, Timeout
from lookonce.commands.output import complain, err, out, visible
from lookonce.commands.pictures import is_image, named_image
from lookonce.commands.targets import connect, decoder_target
from lookonce.errors import LookonceError
from lookonce.generation import GenerateOptions

_HELP = """\
/image FILE|DIGEST   show a picture with the next question; so does a line that is only the path of one
/system TEXT         set the system prompt; without a text, remove it
/history             print the chat so far
/undo                forget the last question and its answer
/clear               forget the whole chat
/exit                end, as Ctrl-D does"""


@takes_sampling
def chat(
    *,
    image: ImageNames = None,
    max_pixels: MaxPixels = None,
    system: System = None,
    target: Target = None,
    timeout_s: Timeout = 120.0,
    sampling: GenerateOptions,
) -> None:
    """Talk with the model, turn by turn. /help lists the commands of the chat.

    On a terminal, Ctrl-C stops an answer, and ends the chat while it waits for a question. Questions may also come
    from a pipe, one in a line; then the first error ends the chat.
    """
    if sampling.get("tools"):
        raise typer.BadParameter("nobody calls functions in a chat; use `lookonce generate`", param_hint="--tools")
    conversation = Conversation(system, [named_image(name, max_pixels) for name in image or []])
    is_terminal = sys.stdin.isatty()
    options: GenerateOptions = {**sampling, "timeout_s": timeout_s}
    with connect(decoder_target(target)) as client:
        if is_terminal:
            # Importing it gives `input` its line editing and the earlier lines.
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401
            err.print("[dim]/help lists commands, Ctrl-D ends.[/]")
        while (line := _read(is_terminal)) is not None:
            try:
                is_over = _take(client, conversation, line.strip(), max_pixels, options, is_terminal)
            except (LookonceError, OSError, typer.BadParameter) as error:
                # A reader that has left ends the chat, and so does any error where nobody can correct it.
                if isinstance(error, BrokenPipeError) or not is_terminal:
                    raise
                complain(_message(error))
                continue
            if is_over:
                return


def _read(is_terminal: bool) -> str | None:
    """Returns the next line; None at the end of the input."""
    if is_terminal and sys.stdout.isatty():
        try:
            return input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return None
    return sys.stdin.readline() or None


def _take(
    client: Client,
    conversation: Conversation,
    line: str,
    max_pixels: int | None,
    options: GenerateOptions,
    is_terminal: bool,
) -> bool:
    """Obeys one line: a command, the path of a picture, or a question. Returns whether the chat is over."""
    command, _, rest = line.partition(" ")
    if not line:
        return False
    if _is_picture(line):
        _add(conversation, line, max_pixels)
    elif not command.startswith("/"):
        _ask(client, conversation, line, options, is_terminal)
    elif command == "/exit":
        return True
    elif command == "/image":
        _add(conversation, rest.strip(), max_pixels)
    elif command == "/system":
        conversation.system = rest.strip() or None
    elif command == "/history":
        for shown in conversation.lines():
            out.print(visible(shown), markup=False, soft_wrap=True)
    elif command == "/undo":
        err.print("forgotten" if conversation.undo() else "there is nothing to forget")
    elif command == "/clear":
        conversation.clear()
    elif command == "/help":
        err.print(_HELP, markup=False, soft_wrap=True)
    else:
        raise typer.BadParameter(f"there is no command {command}; /help lists them")
    return False


def _ask(client: Client, conversation: Conversation, text: str, options: GenerateOptions, is_terminal: bool) -> None:
    messages = conversation.question(text)
    try:
        with client.stream(messages, **options) as stream:
            stream_text(stream)
            conversation.keep(messages, stream.generation.text)
    except KeyboardInterrupt:
        # It may come as soon as the question is on its way.
        if not is_terminal:
            raise
        sys.stdout.write("\n")
        err.print("stopped; the chat goes on without this question")


def _add(conversation: Conversation, name: str, max_pixels: int | None) -> None:
    picture = named_image(_unquoted(name), max_pixels)
    conversation.images.append(picture)
    err.print(f"picture {picture.hex[:16]} comes with the next question")


def _is_picture(line: str) -> bool:
    """Whether a line is only the path of an image file, as terminals write it when a file is dropped on them."""
    path = pathlib.Path(_unquoted(line))
    try:
        return path.is_file() and is_image(path)
    except (OSError, ValueError):
        return False


def _unquoted(name: str) -> str:
    """Returns a path without the quotes that terminals put around one with spaces."""
    return name[1:-1] if len(name) > 1 and name[0] == name[-1] and name[0] in "'\"" else name


def _message(error: LookonceError | OSError | typer.BadParameter) -> str:
    """Returns the text of an error for people."""
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    return with_flag(error) if isinstance(error, LookonceError) else error.message
