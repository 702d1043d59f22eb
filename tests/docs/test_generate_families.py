"""Tests that docs/models.md lists every family that is served and every tiny model of the conformance suite."""

from __future__ import annotations

import ast

import pytest

from docs.generate_families import BEGIN, COLUMNS, END, PAGE, SUITE, VIDEO, page_with_families
from lookonce.families.registry import FAMILIES
from tests import tiny_families


def committed_rows() -> list[list[str]]:
    """Returns the cells of the committed table, row by row."""
    table = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_committed_table_has_every_family_and_every_one_conforms() -> None:
    rows = committed_rows()
    assert [row[1].strip("`") for row in rows] == list(FAMILIES), "run `make families`"
    tested = {name.strip(" `") for row in rows for name in row[2].split(",")}
    assert tested == set(tiny_families.ALL_FAMILIES), "run `make families`"
    assert {mark for row in rows for mark in row[3 : 3 + len(COLUMNS)]} == {"✓"}
    taking = [model_type for model_type, family in FAMILIES.items() if family.video is not None]
    assert [row[1].strip("`") for row in rows if row[3 + len(COLUMNS)] == "✓"] == taking, "run `make families`"


def test_the_columns_are_tests_of_the_suite() -> None:
    tree = ast.parse((PAGE.parents[1] / SUITE).read_text("utf-8"))
    assert set(COLUMNS) <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_family_that_failed_is_marked_and_a_page_without_marks_is_refused() -> None:
    passed = {name: {*COLUMNS, VIDEO} for name in tiny_families.ALL_FAMILIES}
    passed["gemma3"].discard("test_cold")
    passed["qwen3_vl"].discard(VIDEO)
    lines = page_with_families(f"{BEGIN}\n{END}", passed).splitlines()
    failed = [line.partition("|")[2].partition("|")[0].strip() for line in lines if "✗" in line]
    assert failed == ["Qwen3-VL", "Gemma 3"]
    with pytest.raises(ValueError, match="lacks the marks"):
        page_with_families("# Lookonce\n", passed)
