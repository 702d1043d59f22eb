"""Tests that files and links named in the documentation exist."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "models").rglob("*.md"),
        *(ROOT / "examples").glob("*/*.md"),
    ]
)
_PATH = re.compile(
    r"`((?:lookonce|encoder_svc|decoder_svc|gateway_svc|tests|benchmarks|protos|k8s|docs|observability|examples)/[\w./-]*)`"
)
_LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
_ANCHOR = re.compile(r"\]\(([^):#]*)#([^)]+)\)")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pages
def test_named_files_exist(page: pathlib.Path) -> None:
    for name in _PATH.findall(page.read_text("utf-8")):
        assert (ROOT / name).exists(), name


@pages
def test_relative_links_lead_somewhere(page: pathlib.Path) -> None:
    for target in _LINK.findall(page.read_text("utf-8")):
        assert ":" in target or (page.parent / target).exists(), target


@pages
def test_links_to_headings_name_a_heading(page: pathlib.Path) -> None:
    for target, anchor in _ANCHOR.findall(page.read_text("utf-8")):
        headings = re.findall(r"^#+ (.+)$", (page.parent / target if target else page).read_text("utf-8"), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, anchor
