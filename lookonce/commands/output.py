"""Prints results to stdout and everything else to stderr, for people and for programs that read a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

# Signs that would end a cell or a line for a program.
_ESCAPES = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"})

# Control characters but the tab and the line end. A terminal would obey them.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_rows(titles: Sequence[str], rows: Iterable[Sequence[object]], *, is_boxed: bool = True) -> None:
    """Prints a table, without a line of titles if there are none. A cell may be a Text with a style.

    A program that reads a pipe gets the titles and each row as lines with tabs between cells.
    """
    if out.is_terminal:
        out.print(_table(titles, rows, is_boxed))
        return
    for cells in [titles, *rows] if titles else rows:
        print_line(cells)


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]], is_boxed: bool) -> Table:
    table = Table(box=HEAVY_HEAD if is_boxed else None, pad_edge=is_boxed, show_header=bool(titles))
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else escape(harmless(cell)) for cell in row))
    return table


def print_line(cells: Iterable[object]) -> None:
    """Prints one line for programs, with tabs between cells."""
    sys.stdout.write("\t".join(visible(printable(cell).translate(_ESCAPES)) for cell in cells) + "\n")


def print_json(content: object) -> None:
    """Prints a value as one line of JSON."""
    sys.stdout.write(printable(json.dumps(content, ensure_ascii=False)) + "\n")


def printable(value: object) -> str:
    """Returns a text that every stream takes: bytes of file names that are no UTF-8 become escapes."""
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


def harmless(value: object) -> str:
    """Returns a text for one cell or line of people: without line ends and characters that a terminal would obey."""
    return printable(value).translate(_ESCAPES).translate(_CONTROLS)


def visible(text: str) -> str:
    """Returns a foreign text for stdout: on a terminal without control characters, which a picture could cause."""
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text


def digest_cell(digest: str) -> str:
    """Returns a digest in hex for a table: whole for programs, and its beginning for people."""
    return digest[:16] if out.is_terminal else digest


def say(text: str) -> None:
    """Prints a line for people to stderr, without control characters, which names of files may have."""
    err.print(escape(harmless(text)), soft_wrap=True)


def complain(text: str) -> None:
    """Prints an error to stderr; it may have several lines."""
    err.print(f"[bold red]error:[/] {escape(printable(text).translate(_CONTROLS))}", soft_wrap=True)
