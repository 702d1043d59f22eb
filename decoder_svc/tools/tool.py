"""A function that a model may call, and its calls, as the caller sent them. Plain data."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    # JSON schema of its arguments, as text; empty: it takes none.
    parameters: str
    # Whether arguments must conform to the schema even where the model is free to call it or not.
    is_strict: bool = False


class ToolMode(enum.Enum):
    """Whether the model calls functions. The values are those of OpenAI's `tool_choice`."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, must or must not call functions."""

    mode: ToolMode = ToolMode.AUTO
    # Name of the function; set with NAMED only.
    name: str = ""
    # Whether the answer ends behind its first call.
    is_single: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function in an earlier answer."""

    id: str
    name: str
    # A JSON object, as text.
    arguments: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of a call in an answer."""

    # Index of the call in its answer.
    index: int
    # New text of the arguments.
    arguments: str
    # Id and function of the call; set in its first part only.
    id: str = ""
    name: str = ""
