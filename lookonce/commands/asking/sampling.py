"""The sampling flags of every command that generates: one flag for each option of `lookonce.generation`."""

from __future__ import annotations

import functools
import inspect
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, cast

import typer

from lookonce.commands.options import MAX_UINT32, MAX_UINT64, filled
from lookonce.commands.output import harmless
from lookonce.commands.pictures import existing_file
from lookonce.errors import LookonceError
from lookonce.generation import GenerateOptions, Tool

_Flag = inspect.Parameter


def _flag(option: str, kind: Any, text: str, *names: str, **limits: Any) -> _Flag:
    info = typer.Option(*names, help=text, rich_help_panel="Sampling", show_default=False, **limits)
    return _Flag(option, _Flag.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info])


# In the order of the help; each is named after its option. Ranges are those of the contract, which the server checks.
_FLAGS: Sequence[_Flag] = (
    _flag("max_tokens", int, "Longest answer, tokens.", min=1, max=MAX_UINT32),
    _flag("min_tokens", int, "Number of tokens before an answer may end.", min=0, max=MAX_UINT32),
    _flag("temperature", float, "0 is greedy. Default: the model's.", min=0.0, max=100.0),
    _flag("top_p", float, "Sample from the likeliest tokens that have this share together.", min=0.0, max=1.0),
    _flag("top_k", int, "Sample from this many likeliest tokens; 0: all.", min=0, max=MAX_UINT32),
    _flag("min_p", float, "Drop tokens below this share of the likeliest one's probability.", min=0.0, max=1.0),
    _flag("repetition_penalty", float, "Factor against tokens of prompt and answer; 1: none.", min=0.0, max=10.0),
    _flag("presence_penalty", float, "Penalty for tokens that the answer has, -2 to 2.", min=-2.0, max=2.0),
    _flag("frequency_penalty", float, "Penalty for each time that the answer has a token, -2 to 2.", min=-2.0, max=2.0),
    _flag("logit_bias", list[str], "TOKEN_ID=VALUE: adds to the token's logit, -100 to 100; repeatable."),
    _flag("seed", int, "Makes sampling repeatable.", min=0, max=MAX_UINT64),
    _flag("stop", list[str], "Text before which the answer ends; repeatable."),
    _flag(
        "stop_token_ids",
        list[int],
        "Token with which the answer ends; repeatable.",
        "--stop-token-id",
        min=0,
        max=MAX_UINT32,
    ),
    _flag("ignore_eos", bool, "Go on after the model's end of an answer.", "--ignore-eos"),
    _flag("json_schema", str, "JSON schema of the answer, or @FILE with it.", callback=filled),
    _flag("regex", str, "Regular expression of the answer, or @FILE with it.", callback=filled),
    _flag("grammar", str, "Grammar of the answer in Lark's notation, or @FILE with it.", callback=filled),
    _flag("json_object", bool, "The answer is a JSON object.", "--json-object"),
    _flag("choice", list[str], "Text that the answer may be; repeatable."),
    _flag(
        "tools",
        str,
        "Functions that the model may call, as a JSON list of objects with name, description and parameters, or @FILE "
        "with it.",
        callback=filled,
    ),
    _flag("tool_choice", str, "auto, none, required, or the name of the function to call.", callback=filled),
    _flag(
        "parallel_tool_calls",
        bool,
        "Whether an answer may have several calls.",
        "--parallel-tool-calls/--no-parallel-tool-calls",
    ),
    _flag("template_arguments", str, "Arguments of the chat template, as a JSON object.", callback=filled),
    _flag("priority", int, "Requests with a lower number run earlier. Default: 0.", min=-(2**31), max=2**31 - 1),
    _flag("cache_salt", str, "Share the prefix cache only with requests of the same salt.", callback=filled),
    _flag("adapter", str, "Name of a LoRA adapter.", callback=filled),
    _flag("bypass_prefix_cache", bool, "Neither read nor write the prefix cache.", "--bypass-prefix-cache"),
)
# Flags that are not named as their options.
_OTHER_FLAGS = {"stop_token_ids": "--stop-token-id"}
# Largest file of a grammar or schema.
_MAX_FILE_BYTES = 1 << 20
_TEXTS_OR_FILES = ("json_schema", "regex", "grammar", "tools", "template_arguments")
_NO_TOOL = "must be a JSON list of objects with a name, and maybe description, parameters and strict"


def takes_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the sampling flags; the command gets those that are set, as its argument `sampling`."""
    own = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        given = {flag.name: arguments.pop(flag.name) for flag in _FLAGS}
        command(**arguments, sampling=_options(given))

    parameters = [parameter for parameter in own.parameters.values() if parameter.name != "sampling"]
    by_name = [parameter.replace(kind=_Flag.KEYWORD_ONLY) for parameter in parameters]
    run.__signature__ = own.replace(parameters=[*by_name, *_FLAGS])  # type: ignore[attr-defined]
    return run


def _options(given: dict[str, Any]) -> GenerateOptions:
    """Returns the options that are set. Raises BadParameter for a bias that is no pair of numbers."""
    options = {name: value for name, value in given.items() if value is not None and value != []}
    if "logit_bias" in options:
        options["logit_bias"] = dict(map(_bias, options["logit_bias"]))
    for name in _TEXTS_OR_FILES:
        if str(options.get(name, "")).startswith("@"):
            options[name] = _content(existing_file(options[name][1:]))
    if "tools" in options:
        options["tools"] = _tools(options["tools"])
    if "template_arguments" in options:
        options["template_arguments"] = arguments = _json("--template-arguments", options["template_arguments"])
        if not isinstance(arguments, dict):
            raise typer.BadParameter("is no JSON object", param_hint="--template-arguments")
    return cast(GenerateOptions, options)


def _tools(text: str) -> list[Tool]:
    """Returns the functions of a JSON list, each by itself or in the form of OpenAI. Raises BadParameter."""
    functions = _json("--tools", text)
    if not isinstance(functions, list):
        raise typer.BadParameter(_NO_TOOL, param_hint="--tools")
    tools = []
    for each in functions:
        function = each.get("function", each) if isinstance(each, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise typer.BadParameter(_NO_TOOL, param_hint="--tools")
        if unknown := function.keys() - {"name", "description", "parameters", "strict"}:
            raise typer.BadParameter(f"a function has no {min(unknown)!r}", param_hint="--tools")
        tools.append(Tool(**{name: value for name, value in function.items() if value is not None}))
    return tools


def _json(flag: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise typer.BadParameter("is no JSON", param_hint=flag) from None


def _content(path: pathlib.Path) -> str:
    """Returns the text of a file. Raises BadParameter if it is too large or no text."""
    with path.open("rb") as file:
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise typer.BadParameter(f"{harmless(path)} has more than {_MAX_FILE_BYTES >> 20} MiB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{harmless(path)} is no text in UTF-8") from None


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        bias = int(token_id), float(value)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not TOKEN_ID=VALUE", param_hint="--logit-bias") from None
    if not (0 <= bias[0] <= MAX_UINT32 and -100 <= bias[1] <= 100):
        raise typer.BadParameter(f"{text!r} is no token with a value of -100 to 100", param_hint="--logit-bias")
    return bias


def with_flag(error: LookonceError) -> str:
    """Returns the message of an error with the flag in place of the option that the server refuses."""
    name, colon, rest = error.message.partition(": ")
    option = re.split(r"[.\[]", name, maxsplit=1)[0]
    if error.contract_field and option in GenerateOptions.__annotations__:
        flag = _OTHER_FLAGS.get(option, f"--{option.replace('_', '-')}")
        return f"{flag}{name.removeprefix(option)}{colon}{rest}"
    return error.message
