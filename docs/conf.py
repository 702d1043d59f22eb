"""Settings of Sphinx for the site; `docs/build_site.py` calls it. The file's name is Sphinx' own."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from typing import Any

import lookonce

project = "Lookonce"
version = release = lookonce.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "Lookonce"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
# A line of the contract or of a command is no text to hyphenate or to beautify.
smartquotes = False

# Headings have the names that they have on GitHub.
myst_heading_anchors = 4
# Shortened examples have an ellipsis, which their language has not.
suppress_warnings = ["misc.highlighting_failure"]

# In docstrings, one backtick is code, as in Markdown.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
autodoc_default_options = {
    "members": True,
    "inherited-members": "BaseException,Exception,dict,Protocol,Generic",
    "undoc-members": False,
    # Callers never make these objects themselves.
    "exclude-members": "__new__,__init__",
}


def setup(app: Any) -> None:
    """Is called by Sphinx; makes docstrings readable for it, which are not written in its own language."""
    app.connect("autodoc-process-docstring", _prepare)


def _prepare(_app: Any, kind: str, _name: str, value: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = _with_literal_blocks(lines, is_drawing=kind == "module")
    if kind == "class" and (dataclasses.is_dataclass(value) or typing.is_typeddict(value)):
        for name, annotation, comment in _fields(value):
            lines.extend(["", f"``{name}``: *{annotation}*", f"    {comment}"])


def _with_literal_blocks(lines: list[str], *, is_drawing: bool) -> list[str]:
    """Returns a docstring with its indented examples marked; a module's has a drawing after its first line."""
    if is_drawing:
        return [*lines[:1], "", "::", "", *(f"    {line}" for line in lines[1:])]
    marked: list[str] = []
    for number, line in enumerate(lines):
        if line.startswith("    ") and number and not lines[number - 1] and _is_flush(marked):
            marked.extend(["::", ""])
        marked.append(line)
    return marked


def _is_flush(lines: list[str]) -> bool:
    """Returns whether the last line with text begins at the left."""
    return not next((line for line in reversed(lines) if line), " ").startswith(" ")


def _fields(value: type) -> list[tuple[str, str, str]]:
    """Returns name, type and comment of each field of a class, from its source."""
    source = textwrap.dedent(inspect.getsource(value))
    lines = source.splitlines()
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    fields = []
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            comment: list[str] = []
            line = node.lineno - 2
            while line >= 0 and lines[line].lstrip().startswith("#"):
                comment.insert(0, lines[line].lstrip("# "))
                line -= 1
            fields.append((node.target.id, ast.unparse(node.annotation), " ".join(comment)))
    return fields
