"""Writes the reference of all commands in docs/command-line.md from the commands themselves: `make docs`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import typer.main

from docs.marked_page import replace_between
from lookonce.commands.application import app

PAGE = pathlib.Path(__file__).parent / "command-line.md"
BEGIN = "<!-- commands: written by `make docs` -->"
END = "<!-- end of commands -->"
_HEAD = "| argument or flag | default | meaning |\n| --- | --- | --- |"
# Described once, since several commands have them.
_SAMPLING_PANEL = "Sampling"
_SAMPLING_NOTE = "It also takes the [sampling flags](#sampling-flags)."


def commands_text() -> str:
    """Returns a section for each command, then one for the sampling flags."""
    sections = [_section(name, command) for name, command in _commands(typer.main.get_command(app), "lookonce")]
    sampling = [parameter for parameter in _command("generate").params if _is_sampling(parameter)]
    return "\n\n".join([*sections, f"### Sampling flags\n\n{_table(sampling)}"])


def page_with_commands(page: str) -> str:
    """Returns `page` with a current reference between its marks. Raises ValueError when a mark is missing."""
    return replace_between(page, BEGIN, END, commands_text())


def _command(name: str) -> Any:
    group: Any = typer.main.get_command(app)
    return group.commands[name]


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields each command with its full name, those of groups in place of the group."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for child_name, child in command.commands.items():
        yield from _commands(child, f"{name} {child_name}")


def _section(name: str, command: Any) -> str:
    own = [parameter for parameter in command.params if not _is_sampling(parameter) and parameter.name != "help"]
    # A docstring breaks its lines; a page of Markdown keeps paragraphs apart and needs no other breaks.
    text = "\n\n".join(" ".join(part.split()) for part in command.help.split("\n\n"))
    parts = [f"### `{name}`", text, *([_table(own)] if own else [])]
    if len(own) < sum(parameter.name != "help" for parameter in command.params):
        parts.append(_SAMPLING_NOTE)
    return "\n\n".join(parts)


def _is_sampling(parameter: Any) -> bool:
    return bool(getattr(parameter, "rich_help_panel", None) == _SAMPLING_PANEL)


def _table(parameters: list[Any]) -> str:
    return "\n".join([_HEAD, *map(_row, parameters)])


def _row(parameter: Any) -> str:
    is_flag = parameter.param_type_name == "option"
    named = parameter.opts if is_flag else [parameter.metavar or parameter.name.upper()]
    names = ", ".join(f"`{name}`" for name in named).replace("|", "\\|")
    return f"| {names} | {_default(parameter)} | {(parameter.help or '').replace('|', chr(92) + '|')} |"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    return "–" if value is None or value is False or value == [] else f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page_with_commands(PAGE.read_text("utf-8")), "utf-8")
