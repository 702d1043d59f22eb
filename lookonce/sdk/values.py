"""Sets the fields of protobuf messages to what a program has given. Raises InvalidParameterError for wrong types."""

from __future__ import annotations

from typing import Any

from lookonce.errors import InvalidParameterError


def assign(message: Any, name: str, value: object) -> None:
    """Sets a field to one value. Raises InvalidParameterError if it has another type."""
    try:
        setattr(message, name, value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidParameterError(name, f"{value!r} is not a valid value") from None


def fill(message: Any, name: str, values: Any) -> None:
    """Adds values to a repeated field or a map; a single string is a list of one. Raises InvalidParameterError."""
    container = getattr(message, name)
    try:
        if name == "logit_bias":
            container.update(values)
        else:
            container.extend([values] if isinstance(values, str) else values)
    except (TypeError, ValueError, OverflowError):
        raise InvalidParameterError(name, f"{values!r} is not a valid value") from None
