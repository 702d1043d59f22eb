"""Replaces the generated part of a hand-written page, which stands between two marks."""

from __future__ import annotations


def replace_between(page: str, begin: str, end: str, text: str) -> str:
    """Returns `page` with `text` in place of everything between the marks. Raises ValueError when a mark is missing."""
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the page lacks the marks {begin} and {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
