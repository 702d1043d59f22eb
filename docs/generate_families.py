"""Runs the conformance suite and writes its results into the table of docs/models.md: `make families`.

The run takes three minutes. Families whose image processors need torchvision are run apart from the others, as in
`make test`.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Mapping
from xml.etree import ElementTree

from docs.marked_page import replace_between
from lookonce.families.base import Family, Mask, PositionAxes
from lookonce.families.registry import FAMILIES
from tests import tiny_families
from tests.torchvision_families import INSTALLED

PAGE = pathlib.Path(__file__).parent / "models.md"
BEGIN = "<!-- families: written by `make families` from the conformance suite -->"
END = "<!-- end of families -->"
SUITE = "tests/parity/test_family_conformance.py"
# All tests of this suite together fill one column, for families that accept videos.
VIDEO_SUITE = "tests/parity/test_video.py"
VIDEO = "video"
# Name of a test → title of its column.
COLUMNS = {
    "test_prompts_are_those_of_the_familys_own_processor": "prompt",
    "test_cold": "cold",
    "test_rows_from_redis": "from Redis",
    "test_prefix_hits_that_end_inside_an_image": "hit inside an image",
    "test_chunked": "chunked",
    "test_preempted": "preempted",
}
_PASSED, _FAILED = "✓", "✗"


def main() -> None:
    """Runs the suite and rewrites the table. Exits with status 1 when a test failed."""
    passed = run_suite()
    PAGE.write_text(page_with_families(PAGE.read_text("utf-8"), passed), "utf-8")
    if any(not tests >= COLUMNS.keys() for tests in passed.values()) or not _all_video_families_pass(passed):
        sys.exit("not every family conforms; the table says which do not")


def run_suite() -> dict[str, set[str]]:
    """Returns the names of the tests that passed, by tiny family; VIDEO stands for the whole video suite."""
    with tempfile.TemporaryDirectory() as folder:
        passed: dict[str, set[str]] = defaultdict(set)
        videos: dict[str, list[bool]] = defaultdict(list)
        cases = [_cases(pathlib.Path(folder), has_torchvision) for has_torchvision in (False, True)]
        for case in itertools.chain.from_iterable(cases):
            test, _, name = str(case.get("name")).rstrip("]").partition("[")
            has_passed = not {"failure", "error", "skipped"} & {child.tag for child in case}
            if case.get("file") == VIDEO_SUITE:
                videos[name].append(has_passed)
            elif name and has_passed:
                passed[name].add(test)
    for name, results in videos.items():
        if all(results):
            passed[name].add(VIDEO)
    return {name: passed[name] & {*COLUMNS, VIDEO} for name in tiny_families.ALL_FAMILIES}


def _cases(folder: pathlib.Path, has_torchvision: bool) -> list[ElementTree.Element]:
    """Runs the suite; returns the results of its tests."""
    report = folder / f"report-{has_torchvision}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-o", "junit_family=xunit1", f"--junitxml={report}"]
    variables = dict(os.environ)
    if has_torchvision:
        variables["PYTHONPATH"] = os.pathsep.join([str(INSTALLED), *filter(None, [variables.get("PYTHONPATH")])])
    marked = "torchvision" if has_torchvision else "not torchvision"
    subprocess.run([*command, "-m", marked, SUITE, VIDEO_SUITE], check=False, cwd=PAGE.parents[1], env=variables)
    return list(ElementTree.parse(report).getroot().iter("testcase"))


def page_with_families(page: str, passed: Mapping[str, Collection[str]]) -> str:
    """Returns `page` with a table of these results between its marks. Raises ValueError when a mark is missing."""
    return replace_between(page, BEGIN, END, _table(passed))


def _table(passed: Mapping[str, Collection[str]]) -> str:
    variants: dict[str, list[str]] = defaultdict(list)
    for name in passed:
        variants[_model_type(name)].append(name)
    head = ["family", "model type", "tested with", *COLUMNS.values(), VIDEO, "notes"]
    rows = [" | ".join(head), " | ".join("---" for _ in head)]
    for model_type, family in FAMILIES.items():
        names = sorted(variants[model_type])
        marks = [_PASSED if all(test in passed[name] for name in names) else _FAILED for test in COLUMNS]
        marks.append(_video_mark(family, names, passed))
        cells = [family.title, f"`{model_type}`", ", ".join(f"`{name}`" for name in names), *marks, _notes(family)]
        rows.append(" | ".join(cells))
    return "\n".join(f"| {row} |" for row in rows)


def _video_mark(family: Family, names: Collection[str], passed: Mapping[str, Collection[str]]) -> str:
    if family.video is None:
        return ""
    return _PASSED if all(VIDEO in passed[name] for name in names) else _FAILED


def _all_video_families_pass(passed: Mapping[str, Collection[str]]) -> bool:
    """Returns whether every family that accepts videos passed the video suite."""
    video_types = {model_type for model_type, family in FAMILIES.items() if family.video is not None}
    return all(VIDEO in tests for name, tests in passed.items() if _model_type(name) in video_types)


def _model_type(name: str) -> str:
    """Returns the model type in the configuration of this tiny family, which is its name unless there are several."""
    if name in FAMILIES:
        return name
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_families.ALL_FAMILIES[name].build(pathlib.Path(folder) / name)
        return str(json.loads((path / "config.json").read_text())["model_type"])


def _notes(family: Family) -> str:
    words = []
    if family.has_max_pixels:
        words.append("`max_pixels`")
    if family.axes in (PositionAxes.MROPE, PositionAxes.CANVAS):
        words.append("M-RoPE")
    if family.axes is PositionAxes.XDROPE:
        words.append("XD-RoPE")
    if family.has_levels:
        words.append("feature levels")
    if family.mask is Mask.IMAGE:
        words.append("an image is never split over steps")
    if family.mask is Mask.PROMPT:
        words.append("a prompt is never split; only equal prompts share KV blocks")
    if family.depends_on_image_count:
        words.append("no tiles when a prompt shows several images")
    return ", ".join(words)


if __name__ == "__main__":
    main()
