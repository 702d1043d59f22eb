"""Finds docstrings and comments that are no sentences: `python -m tests.prose lookonce/store` lists them.

A docstring's first sentence is a noun phrase that says what the thing is, or a verb that says what the call does. One
that opens with What, Of or Where, or that has four words or fewer, rarely tells a reader either.
"""

from __future__ import annotations

import ast
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

_OPENINGS = "What|Of|Where|How|So|Which|Whose|Whom|Who|When|Whenever|Why|From here|As|Beside|Besides|Behind|Not|Nor"
_FRAGMENT = re.compile(rf"({_OPENINGS})\b")
MIN_WORDS = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """One text that a reader has to read twice."""

    path: pathlib.Path
    line: int
    text: str

    def __str__(self) -> str:
        """The place as editors and compilers write it, and the text's first line."""
        return f"{self.path}:{self.line}: {self.text}"


def findings(path: pathlib.Path) -> Iterator[Finding]:
    """Docstrings and comments of one Python file that break the rule."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        first_line = text.split("\n")[0]
        sentence = re.split(r"[.:;](?:\s|$)", text.split("\n\n")[0])[0]
        is_short = max(len(sentence.split()), len(text.split())) < MIN_WORDS
        # A benchmark's module states its question.
        if is_short or (_FRAGMENT.match(text) and "?" not in first_line):
            yield Finding(path, getattr(node, "lineno", 1), first_line)
    yield from _comment_findings(path, source)


def _comment_findings(path: pathlib.Path, source: str) -> Iterator[Finding]:
    """Comment blocks that open like a fragment."""
    last_comment_line = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        text = token.string.lstrip("#: ")
        if line != last_comment_line + 1 and _FRAGMENT.match(text):
            yield Finding(path, line, token.string)
        last_comment_line = line


def product_files(*folders: str) -> Iterator[pathlib.Path]:
    """Python files below some folders, without generated ones."""
    for folder in folders:
        root = pathlib.Path(folder)
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            if "_pb2" not in path.name:
                yield path


if __name__ == "__main__":
    found = [finding for path in product_files(*sys.argv[1:]) for finding in findings(path)]
    print(*found, f"{len(found)} findings", sep="\n")
