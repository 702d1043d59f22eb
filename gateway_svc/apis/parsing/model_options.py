"""Wishes that only some models can fulfil: functions, reasoning and arguments of the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway_svc.apis.parsing.content import Turn
from gateway_svc.apis.parsing.fields import Field, Fields
from lookonce.decoder_info import ModelInfo
from lookonce.errors import InvalidParameterError, UnsupportedError
from lookonce.generation import GenerateOptions

TEMPLATE_FIELD = "chat_template_kwargs"
TEMPLATE_ARGUMENTS = Field(
    "honoured",
    "Extension, as vLLM has it: arguments of the model's chat template, for example `enable_thinking`. Those that the "
    "template does not take are refused.",
)
EFFORT_NOTE = (
    "`none` turns reasoning off where the chat template takes `enable_thinking`, and has no effect elsewhere. Other "
    "values need a template that takes `reasoning_effort`."
)

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Arguments by which templates turn reasoning on or off, and choose its length.
_THINKING, _EFFORT = "enable_thinking", "reasoning_effort"
# Decoders take no longer texts as arguments, and no template takes more of them.
_MAX_ARGUMENTS, _MAX_TEXT = 32, 64


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning that a request asks for."""

    # Whether the model reasons; None: as its template has it.
    is_wanted: bool | None = None
    # Length of the reasoning, in the words of OpenAI; None: the template's.
    effort: str | None = None
    # The place of the wish in the request, for errors.
    where: str = ""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The wishes of one request."""

    reasoning: Reasoning = field(default_factory=Reasoning)
    # Arguments of the chat template that the request names.
    template_arguments: Mapping[str, object] = field(default_factory=dict)

    def added_to(self, options: GenerateOptions, turns: Sequence[Turn], info: ModelInfo) -> GenerateOptions:
        """Returns the options for a model, with the arguments of its template.

        Raises InvalidParameterError and UnsupportedError for what the model does not have. A decoder that is older than
        these fields would not see them.
        """
        uses_functions = options.get("tools") or any(turn.calls or turn.role == "tool" for turn in turns)
        if uses_functions and not info.tool_format:
            raise UnsupportedError(
                "tools: the chat template of this model knows no functions, or writes their calls in a form that is "
                "not known here",
                metadata={"field": "tools"},
            )
        arguments = self._arguments(frozenset(info.template_arguments))
        return {**options, "template_arguments": arguments} if arguments else options

    def _arguments(self, known: frozenset[str]) -> dict[str, object]:
        if unknown := sorted(self.template_arguments.keys() - known):
            takes = ", ".join(sorted(known)) or "none"
            raise InvalidParameterError(TEMPLATE_FIELD, f"the template takes no {unknown[0]!r}; it takes {takes}")
        arguments: dict[str, object] = {}
        if self.reasoning.is_wanted is not None and _THINKING in known:
            arguments[_THINKING] = self.reasoning.is_wanted
        if self.reasoning.effort is not None:
            if _EFFORT not in known:
                raise InvalidParameterError(self.reasoning.where, f"this model's chat template takes no {_EFFORT}")
            arguments[_EFFORT] = self.reasoning.effort
        if any(self.template_arguments.get(name, value) != value for name, value in arguments.items()):
            raise InvalidParameterError(self.reasoning.where, f"contradicts {TEMPLATE_FIELD}")
        return {**self.template_arguments, **arguments}


def template_arguments(fields: Fields) -> Mapping[str, object]:
    """Returns the arguments of the chat template. Raises InvalidParameterError for what no template takes."""
    values = fields.raw("chat_template_kwargs")
    if values is None:
        return {}
    if not isinstance(values, dict) or len(values) > _MAX_ARGUMENTS:
        raise fields.wrong(TEMPLATE_FIELD, f"must be an object of at most {_MAX_ARGUMENTS} arguments")
    for name, value in values.items():
        is_short = not isinstance(value, str) or len(value) <= _MAX_TEXT
        if len(name) > _MAX_TEXT or isinstance(value, dict | list) or not is_short:
            raise fields.wrong(
                TEMPLATE_FIELD, f"must have booleans, numbers, null and texts of at most {_MAX_TEXT} characters"
            )
    return values


def reasoning_of_effort(effort: str | None, where: str) -> Reasoning:
    """Returns the reasoning for an effort in OpenAI's words. Raises InvalidParameterError for other words."""
    if effort is not None and effort not in _EFFORTS:
        raise InvalidParameterError(where, f"must be one of {', '.join(_EFFORTS)}")
    if effort == "none":
        return Reasoning(is_wanted=False, where=where)
    return Reasoning(effort=effort, where=where)
