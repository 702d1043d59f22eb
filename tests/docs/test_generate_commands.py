"""Tests that the page of the command line lists exactly the commands and flags of the code."""

from __future__ import annotations

import re

import pytest

from docs.generate_commands import PAGE, page_with_commands
from lookonce.generation import GenerateOptions


def test_the_committed_page_is_current() -> None:
    page = PAGE.read_text("utf-8")
    assert page == page_with_commands(page), "run `make docs`"


def test_every_command_has_a_section_and_every_argument_a_meaning() -> None:
    page = PAGE.read_text("utf-8")
    names = re.findall(r"^### `lookonce ([\w ]+)`$", page, re.MULTILINE)
    assert len(names) == len(set(names))
    assert {"up", "serve encoder", "generate", "chat", "cache evict", "config show", "top", "bench"} <= set(names)
    rows = re.findall(r"^\| `[^|]*`(?:, `[^|]*`)* \| (.*) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > len(names)
    assert all(meaning for _, meaning in rows)


@pytest.mark.parametrize("option", sorted(GenerateOptions.__annotations__))
def test_every_option_of_the_sdk_is_listed(option: str) -> None:
    flag = {"stop_token_ids": "--stop-token-id", "n": "--answers"}.get(option, f"--{option.replace('_', '-')}")
    assert f"`{flag}`" in PAGE.read_text("utf-8")
