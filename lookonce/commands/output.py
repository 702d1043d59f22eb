"""Prints results to stdout and everything else to stderr, for people and for programs that read a pipe."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

_REPORT_WIDTH = 150

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_report(table: Table) -> None:
    """Prints a table. In files and pipes, which have no width, long fingerprints and names stay on one line."""
    shown = out if out.is_terminal else Console(highlight=False, width=max(out.width, _REPORT_WIDTH))
    shown.print(table)
