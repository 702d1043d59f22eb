"""The forms in which models write calls of functions, as data. A model's chat template shows which one it was taught.

Sources: the chat templates of the models on the Hugging Face Hub, named at each form.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class CallStyle(enum.Enum):
    """Kinds of text between the beginning and the end of calls."""

    # {"name": "f", "arguments": {"x": 1}}
    JSON = "json"
    # [{"name": "f", "arguments": {"x": 1}}, …]
    JSON_LIST = "json_list"
    # f{"x": 1}, with a separator between name and arguments
    NAME_AND_JSON = "name_and_json"
    # [f(x=1), …]
    PYTHON = "python"
    # f, and each argument between tags of its own
    TAGS = "tags"
    # f{x:1}, with marks of their own around texts
    MARKED = "marked"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A form in which models write calls, as data."""

    name: str
    style: CallStyle
    # Text before each call; with the two kinds of lists, before the list. Empty: the answer is nothing but calls.
    begin: str
    # Text behind each call; empty: the end of its JSON ends a call.
    end: str = ""
    # Key of the arguments beside "name".
    arguments_key: str = "arguments"
    # White space between `begin` or `end` and a call, and text between two calls, as models write them.
    padding: str = ""
    between: str = ""
    # With NAME_AND_JSON, the text between the name and the arguments.
    separator: str = ""
    # With MARKED, the text before and behind each text.
    mark: str = ""
    # With TAGS and MARKED, the text before the name. With TAGS, the texts behind it, before and behind the name of an
    # argument, and behind its value.
    name_begin: str = ""
    name_end: str = ""
    key_begin: str = ""
    key_end: str = ""
    value_end: str = ""
    # With TAGS: text behind the last argument.
    arguments_end: str = ""


# In the order in which a template is compared with them: the forms with more texts of their own come first.
TOOL_FORMATS = (
    # Qwen3-Coder, Qwen3.5
    ToolFormat(
        "qwen_xml",
        CallStyle.TAGS,
        begin="<tool_call>",
        end="</tool_call>",
        between="\n",
        name_begin="\n<function=",
        name_end=">\n",
        key_begin="<parameter=",
        key_end=">\n",
        value_end="\n</parameter>\n",
        arguments_end="</function>\n",
    ),
    # GLM-4.5, GLM-4.5V, GLM-4.6V
    ToolFormat(
        "glm",
        CallStyle.TAGS,
        begin="<tool_call>",
        end="</tool_call>",
        between="\n",
        name_end="\n",
        key_begin="<arg_key>",
        key_end="</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
    ),
    # FunctionGemma
    ToolFormat(
        "gemma",
        CallStyle.MARKED,
        begin="<start_function_call>",
        end="<end_function_call>",
        name_begin="call:",
        mark="<escape>",
    ),
    # Gemma 4
    ToolFormat("gemma4", CallStyle.MARKED, begin="<|tool_call>", end="<tool_call|>", name_begin="call:", mark='<|"|>'),
    # Hermes, Qwen2.5, Qwen3, Qwen3-VL
    ToolFormat("hermes", CallStyle.JSON, begin="<tool_call>", end="</tool_call>", padding="\n", between="\n"),
    # Mistral Small 3.2, Magistral, Devstral
    ToolFormat("mistral", CallStyle.NAME_AND_JSON, begin="[TOOL_CALLS]", separator="[ARGS]"),
    # Mistral Small 3.1 and earlier ones
    ToolFormat("mistral_list", CallStyle.JSON_LIST, begin="[TOOL_CALLS]"),
    # Llama 3.2 with several calls, Llama 4
    ToolFormat("python", CallStyle.PYTHON, begin=""),
    # Llama 3.1
    ToolFormat("llama", CallStyle.JSON, begin="", arguments_key="parameters"),
)


# The call by which a form is recognised.
PROBE_NAME, PROBE_KEY, PROBE_VALUE = "probe_function", "probe_key", "probe_value"


def format_of(rendered: str) -> ToolFormat | None:
    """Returns the form of a rendered call of `PROBE_NAME` with one argument; None if it is none of the known ones."""
    compact = "".join(rendered.split())
    for form in TOOL_FORMATS:
        if form.begin in rendered and form.end in rendered and _PROBES[form.style](form) in compact:
            return form
    return None


def _probe_of_tags(form: ToolFormat) -> str:
    text = f"{form.name_begin}{PROBE_NAME}{form.name_end}{form.key_begin}{PROBE_KEY}{form.key_end}{PROBE_VALUE}"
    return "".join(text.split())


_PROBES: dict[CallStyle, Callable[[ToolFormat], str]] = {
    CallStyle.JSON: lambda form: f'"name":"{PROBE_NAME}","{form.arguments_key}":{{"{PROBE_KEY}":"{PROBE_VALUE}"}}',
    CallStyle.JSON_LIST: lambda form: f'[{{"name":"{PROBE_NAME}","{form.arguments_key}":{{"{PROBE_KEY}"',
    CallStyle.NAME_AND_JSON: lambda form: f'{form.separator}{{"{PROBE_KEY}":"{PROBE_VALUE}"}}',
    CallStyle.PYTHON: lambda form: f"{PROBE_NAME}({PROBE_KEY}=",
    CallStyle.TAGS: _probe_of_tags,
    CallStyle.MARKED: lambda form: f"{form.name_begin}{PROBE_NAME}{{{PROBE_KEY}:{form.mark}{PROBE_VALUE}{form.mark}}}",
}
