"""The test command runs both parts whatever the first one gives, and its summary and exit status tell of both."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests import run

PYTEST_INI = "[pytest]\nmarkers =\n    services: x\n    image: x\n"
FIRST = "def test_first(): assert {}\n"
SECOND = "import pytest\n@pytest.mark.services\ndef test_second(): assert {}\n"
SKIPPED = "import pytest\n@pytest.mark.skip(reason='no such device')\ndef test_skipped(): pass\n"
INTERRUPTED = "def test_first(): raise KeyboardInterrupt\n"
BROKEN = "nonsense"


@pytest.fixture(autouse=True)
def few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads only the plugin that the command's options need: loading all of them takes a second each time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")


def status_of(folder: pathlib.Path, *files: str) -> int:
    """Exit status of the command on a folder with these test files."""
    (folder / "pytest.ini").write_text(PYTEST_INI)
    for number, text in enumerate(files):
        (folder / f"test_{number}.py").write_text(text)
    return run.main(["--jobs", "0", "-p", "no:cacheprovider", str(folder)])


def rows(text: str) -> dict[str, list[int]]:
    """Passed, failed and skipped of each line of the summary's table."""
    pattern = r"^(in parallel|one at a time|total) +(\d+) +(\d+) +(\d+) +\d+$"
    return {name: [int(one) for one in numbers] for name, *numbers in re.findall(pattern, text, re.MULTILINE)}


@pytest.mark.parametrize(("first", "second", "status"), [(True, True, 0), (False, True, 1), (True, False, 1)])
def test_both_parts_run_and_any_failure_counts(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str], first: bool, second: bool, status: int
) -> None:
    assert status_of(tmp_path, FIRST.format(first), SECOND.format(second), SKIPPED) == status
    printed = capfd.readouterr().out
    assert rows(printed) == {
        "in parallel": [int(first), int(not first), 1],
        "one at a time": [int(second), int(not second), 0],
        "total": [first + second, 2 - first - second, 1],
    }
    assert "skipped   1: no such device" in printed
    assert ("failed: test_0::test_first" in printed) == (not first)
    assert ("failed: test_1::test_second" in printed) == (not second)
    assert len(re.findall(r"^=* ?.*\b(?:passed|failed).* in \d", printed, re.MULTILINE)) == 2, "pytest's closing lines"


def test_a_part_without_tests_is_good(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert status_of(tmp_path, FIRST.format(True)) == 0
    assert rows(capfd.readouterr().out)["one at a time"] == [0, 0, 0]


def test_a_file_that_cannot_be_collected_is_a_failure(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert status_of(tmp_path, BROKEN, SECOND.format(True)) != 0
    assert rows(capfd.readouterr().out)["in parallel"][1] == 1


def test_pytest_that_does_not_start_is_a_failure(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--no-such-option"]) == 4
    assert "in parallel: pytest ended with exit status 4" in capfd.readouterr().out


def test_after_an_interruption_nothing_more_is_begun(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert status_of(tmp_path, INTERRUPTED, SECOND.format(True)) == 2
    assert "one at a time" not in rows(capfd.readouterr().out)
