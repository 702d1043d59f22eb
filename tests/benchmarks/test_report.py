"""Sections of the results page."""

from __future__ import annotations

from benchmarks.report import page_with_section, table

PAGE = "# Results\n"


def test_a_new_section_is_appended_and_an_old_one_replaced() -> None:
    page = page_with_section(page_with_section(PAGE, "one", "first"), "two", "second")
    assert page == page_with_section(page, "two", "second")
    changed = page_with_section(page, "one", "changed")
    assert changed == page.replace("first", "changed")
    assert changed.startswith(PAGE)
    assert changed.index("changed") < changed.index("second")


def test_a_table_has_one_line_per_row() -> None:
    assert table(["a", "b"], [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |"
