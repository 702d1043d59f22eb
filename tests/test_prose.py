"""Docstrings and comments are sentences; see tests/prose.py for the rule."""

from __future__ import annotations

import pathlib

import pytest

from tests.prose import findings, product_files

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = (
    "lookonce",
    "encoder_svc",
    "decoder_svc",
    "gateway_svc",
    "benchmarks",
    "demo",
    "docs",
    "observability",
    "examples/python",
    "tests",
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_and_no_comment_is_a_fragment(folder: str) -> None:
    assert [str(finding) for path in product_files(str(ROOT / folder)) for finding in findings(path)] == []


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ('"""What fits."""', True),
        ('"""Of this moment, and of the next one, if there is one."""', True),
        ('"""Free blocks."""', True),
        ('"""Capacity limits, fixed at start-up."""', False),
        ('"""How many images per second does the encoder compute?"""', False),
        ("# Of each request.\nx = 1", True),
        ("# Seconds of each request.\nx = 1", False),
        # The second line of a block continues the first.
        ("# The number of requests,\n# Of which none failed.\nx = 1", False),
    ],
)
def test_the_rule_finds_fragments_only(tmp_path: pathlib.Path, text: str, is_found: bool) -> None:
    path = tmp_path / "module.py"
    path.write_text(text + "\n")
    assert bool(list(findings(path))) is is_found
