"""Errors for exceptions of transformers and torch that a configuration causes, in one line with the numbers involved.

Half of the numbers in config.json are used only when a model is built or computes, such as the number of experts of a
token. What fails then says nothing of the field, but the statement that failed has the numbers in it.
"""

from __future__ import annotations

import linecache
import re
import traceback
from typing import Any

from lookonce.errors import ModelFolderError
from lookonce.model.faults.read_fields import (
    copied_fields,
    is_number,
    is_shown,
    listed,
    own_name,
    part_name,
    read_fields,
    source_of,
)

_MODELS = "transformers.models."
_ATTRIBUTE = re.compile(r"\b(?:self\.config|self|config)\.(\w+)")
_ADVICE = "use the config.json that belongs to the weights"


def in_one_line(error: BaseException) -> str:
    """Returns the type and the text of an exception of another library, whose text may have several lines."""
    return f"{type(error).__name__} {' '.join(str(error).split())}".rstrip()


def built_fault(half: str, error: Exception) -> ModelFolderError:
    """Returns the error for an exception while the half of this name was built."""
    return ModelFolderError(
        f"the {half} half cannot be built from config.json: {in_one_line(error)}{_place(error)}; {_ADVICE}"
    )


def step_fault(error: Exception) -> ModelFolderError:
    """Returns the error for an exception in a step of the language model."""
    return ModelFolderError(
        f"the language model cannot compute a step with config.json: {in_one_line(error)}{_place(error)}; {_ADVICE}"
    )


def _place(error: Exception) -> str:
    """Returns the module of a model in which an exception arose, and fields of config.json with their values.

    The fields are those in the statement that failed, or all that the module reads. Empty if the module is unknown.
    """
    found, whole, config = "", None, None
    frames = traceback.extract_tb(error.__traceback__)
    for summary, (frame, _) in zip(frames, traceback.walk_tb(error.__traceback__), strict=True):
        owner, module = frame.f_locals.get("self"), str(frame.f_globals.get("__name__"))
        if owner is None or not module.startswith(_MODELS):
            continue
        config = getattr(owner, "config", None) or frame.f_locals.get("config") or config
        whole = whole or config
        lines = range(summary.lineno or 0, (summary.end_lineno or summary.lineno or 0) + 1)
        statement = "".join(linecache.getline(summary.filename, line) for line in lines)
        stated = _stated(owner, config, statement, part_name(whole, config))
        if stated or not found:
            found = f" in {type(owner).__name__}" + (f" with {listed(stated)}" if stated else "")
    return found


def _stated(owner: Any, config: Any, statement: str, part: str) -> dict[str, Any]:
    """Returns the numbers in a statement, and fields: those in the statement, or else all that the class reads."""
    source = source_of(type(owner))
    copied = copied_fields(source)
    fields: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    for name in _ATTRIBUTE.findall(statement):
        field = own_name(config, copied.get(name, name))
        if is_shown(config, field):
            fields[part + field] = getattr(config, field)
        elif is_number(value := getattr(owner, name, None)):
            numbers[name] = value
    entries = read_fields(config, statement)
    if fields or entries:
        fields |= {part + name: value for name, value in entries.items()}
    else:
        fields = {part + name: value for name, value in read_fields(config, source).items()}
    return numbers | fields
