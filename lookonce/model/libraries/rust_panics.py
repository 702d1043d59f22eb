"""Panics of libraries in Rust (tokenizers, safetensors), turned into errors that `except Exception` catches.

PyO3 raises a panic as its own exception, which derives from BaseException. It would pass every border that is made for
the errors of libraries. The library stays usable after a panic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")

# Each library has a class of its own with this name, which cannot be imported.
_MODULE, _NAME = "pyo3_runtime", "PanicException"


class RustPanicError(RuntimeError):
    """A library in Rust panicked. The cause has its text, which may quote the input."""


def call_rust(
    function: Callable[ArgumentsT, ResultT], *arguments: ArgumentsT.args, **keywords: ArgumentsT.kwargs
) -> ResultT:
    """Calls a function that uses a library in Rust, and returns its result.

    Raises what the function raises, but RustPanicError in place of a panic.
    """
    try:
        return function(*arguments, **keywords)
    except BaseException as error:
        if (type(error).__module__, type(error).__name__) != (_MODULE, _NAME):
            raise
        raise RustPanicError("a library in Rust panicked") from error
