"""The example on the page about new devices is the plug-in that the tests install and run."""

from __future__ import annotations

import re

from tests.conftest import REPOSITORY
from tests.device_plugins import EXAMPLE

PAGE = (REPOSITORY / "docs/adding-a-device.md").read_text("utf-8")
BLOCK = re.compile(r"<!-- (?P<path>tests/example_device/\S+) -->\n```\w+\n(?P<text>.*?)```", re.DOTALL)


def test_the_page_shows_the_files_of_the_example_as_they_are() -> None:
    shown = {match["path"]: match["text"] for match in BLOCK.finditer(PAGE)}
    files = [EXAMPLE / "pyproject.toml", *(EXAMPLE / "fixed_steps").glob("*.py")]
    expected = {
        str(path.relative_to(REPOSITORY)): path.read_text("utf-8") for path in files if path.name != "__init__.py"
    }
    assert shown == expected
