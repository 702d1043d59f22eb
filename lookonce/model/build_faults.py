"""Errors for exceptions of transformers and torch that a configuration causes, in one line with the numbers involved.

Half of the numbers in config.json are used only when a model is built or computes, such as the number of experts of a
token. What fails then says nothing of the field, but the statement that failed has the numbers in it.
"""

from __future__ import annotations

import linecache
import re
import traceback

from lookonce.errors import ModelFolderError

_MODELS = "transformers.models."
_ATTRIBUTE = re.compile(r"\b(?:self|config|self\.config)\.(\w+)")
_ADVICE = "use the config.json that belongs to the weights"


def in_one_line(error: BaseException) -> str:
    """Returns the type and the text of an exception of another library, whose text may have several lines."""
    return f"{type(error).__name__} {' '.join(str(error).split())}".rstrip()


def built_fault(half: str, error: Exception) -> ModelFolderError:
    """Returns the error for an exception while the half of this name was built."""
    place = _place(error)
    return ModelFolderError(f"the {half} half cannot be built from config.json: {in_one_line(error)}{place}; {_ADVICE}")


def step_fault(error: Exception) -> ModelFolderError:
    """Returns the error for an exception in a step of the language model."""
    return ModelFolderError(f"the language model cannot compute a step: {in_one_line(error)}{_place(error)}; {_ADVICE}")


def _place(error: Exception) -> str:
    """Returns the module of a model in which an exception arose, and the numbers in the statement; empty if unknown."""
    found = ""
    frames = traceback.extract_tb(error.__traceback__)
    for summary, (frame, _) in zip(frames, traceback.walk_tb(error.__traceback__), strict=True):
        owner = frame.f_locals.get("self")
        if owner is None or not str(frame.f_globals.get("__name__")).startswith(_MODELS):
            continue
        lines = range(summary.lineno or 0, (summary.end_lineno or summary.lineno or 0) + 1)
        statement = "".join(linecache.getline(summary.filename, line) for line in lines)
        owners = (owner, getattr(owner, "config", None), frame.f_locals.get("config"))
        numbers = {
            name: value
            for name in _ATTRIBUTE.findall(statement)
            for each in owners
            if isinstance(value := getattr(each, name, None), int | float) and not isinstance(value, bool)
        }
        stated = ", ".join(f"{name} = {value}" for name, value in numbers.items())
        found = f" in {type(owner).__name__}" + (f" with {stated}" if stated else "")
    return found
