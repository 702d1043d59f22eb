"""tests/README.md names every reason for which a test is skipped, and no other."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

TESTS = pathlib.Path(__file__).parent
# | what the test needs | reason | file |
ROW = re.compile(r"^\| [^|]+ \| (?P<reason>[^|]+) \| `(?P<file>[^|]+)` \|$", re.MULTILINE)
_SKIPPING = {"skip", "skipif", "importorskip"}
# Stands for what a test computes.
_COMPUTED = "…"


def text_of(node: ast.expr, tree: ast.Module) -> str:
    """A string expression; the parts of it that are computed become "…"."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part, tree) for part in parts)
        case ast.Name(id=name):
            for other in ast.walk(tree):
                if isinstance(other, ast.Assign) and ast.unparse(other.targets[0]) == name:
                    return text_of(other.value, tree)
    return _COMPUTED


def reasons(path: pathlib.Path) -> Iterator[str]:
    """Reasons to skip in one file."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _SKIPPING:
            by_keyword = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
            yield text_of([*by_keyword, *node.args][0], tree)


def test_the_table_has_every_reason_to_skip() -> None:
    found = {(reason, str(path.relative_to(TESTS))) for path in TESTS.rglob("*.py") for reason in reasons(path)}
    page = (TESTS / "README.md").read_text("utf-8")
    told = {(match["reason"].replace("`", ""), match["file"]) for match in ROW.finditer(page)}
    assert len(found) > 20
    assert {(reason.replace("`", ""), file) for reason, file in found} == told
