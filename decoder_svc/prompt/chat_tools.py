"""The functions of a chat: checks them, and says how its answer is read and what it is bound to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from decoder_svc.prompt.chat_template import ChatTemplate
from decoder_svc.prompt.prompt_spec import ChatMessage, ChatPrompt, ChatRole
from decoder_svc.prompt.text_tokenizer import TextTokenizer
from decoder_svc.scheduling.sampling_params import Constraint
from decoder_svc.tools.answer_reader import AnswerForm
from decoder_svc.tools.call_grammar import call_constraint
from decoder_svc.tools.call_reader import Functions
from decoder_svc.tools.tool import ToolChoice, ToolMode
from decoder_svc.tools.tool_formats import ToolFormat
from lookonce.errors import InvalidParameterError, UnsupportedError

_MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAME_RULE = "must be 1 to 64 characters of [A-Za-z0-9._-]"
_MAX_ID_CHARS = 128
# Tokens at the end of a prompt among which its last text is.
_NUM_LAST_TOKENS = 16


class ChatTools:
    """The functions of chats for one model; safe to use from several threads at once."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate | None) -> None:
        """`template` None: there are no chats."""
        self._tokenizer = tokenizer
        self._template = template

    def check(self, chat: ChatPrompt) -> None:
        """Raises InvalidParameterError that names the field, and UnsupportedError if the template has no functions."""
        uses_tools = chat.tools or any(message.calls or message.role is ChatRole.TOOL for message in chat.messages)
        if uses_tools and (self._template is None or self._template.tool_format is None):
            raise UnsupportedError(
                "chat.tools: the chat template of this model knows no functions, or writes their calls in a form that "
                "is not known here"
            )
        _check_tools(chat)
        known_ids: set[str] = set()
        for index, message in enumerate(chat.messages):
            _check_message(f"chat.messages[{index}]", message, known_ids)

    def form_of(self, chat: ChatPrompt, token_ids: Sequence[int]) -> AnswerForm | None:
        """Returns how the answer to a prompt is read; None if all of it is text for the user."""
        template = self._template
        if template is None:
            return None
        functions: Functions | None = None
        shown_ids: set[int] = set()
        if chat.shown_tools and template.tool_format is not None:
            functions = Functions(
                template.tool_format, {tool.name: _types_of(tool.parameters) for tool in chat.shown_tools}
            )
            shown_ids.update(self._special_ids(_texts_of(template.tool_format)))
        reasoning, begins_in_reasoning = template.reasoning, False
        if reasoning is not None:
            last = self._tokenizer.decode(list(token_ids[-_NUM_LAST_TOKENS:]), skip_special_tokens=False).rstrip()
            begins_in_reasoning = last.endswith(reasoning.begin)
            if last.endswith(reasoning.end):
                # The prompt has ended the reasoning, so that there is none.
                reasoning = None
            else:
                shown_ids.update(self._special_ids([reasoning.begin, reasoning.end]))
        if functions is None and reasoning is None:
            return None
        return AnswerForm(
            reasoning=reasoning,
            begins_in_reasoning=begins_in_reasoning,
            functions=functions,
            is_single_call=chat.tool_choice.is_single
            or chat.tool_choice.mode is ToolMode.NAMED
            or not template.takes_several_calls,
            is_forced=functions is not None and chat.tool_choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED),
            shown_token_ids=frozenset(shown_ids),
        )

    def constraint_of(self, chat: ChatPrompt, form: AnswerForm) -> Constraint | None:
        """Returns the constraint on an answer of this form; None if there is none.

        Raises InvalidParameterError and UnsupportedError for functions that cannot be forced.
        """
        if form.functions is None:
            return None
        return call_constraint(
            chat.tools,
            replace(chat.tool_choice, is_single=form.is_single_call),
            form.functions.form,
            form.reasoning,
            self._tokenizer.control_id,
            begins_in_reasoning=form.begins_in_reasoning,
        )

    def _special_ids(self, texts: Sequence[str]) -> Iterator[int]:
        """Yields the ids of those texts that are tokens without text in answers."""
        for text in texts:
            token_id = self._tokenizer.backend.token_to_id(text)
            if token_id is not None and token_id in self._tokenizer.special_token_ids:
                yield token_id


def _texts_of(form: ToolFormat) -> list[str]:
    """Returns the texts of a form that may be tokens of their own."""
    lines = [form.begin, form.end, form.separator, form.mark, form.key_begin, form.value_end.strip(), "[CALL_ID]"]
    return [text for text in (*lines, *form.key_end.split()) if text]


def _check_tools(chat: ChatPrompt) -> None:
    if len(chat.tools) > _MAX_TOOLS:
        raise InvalidParameterError("chat.tools", f"must be at most {_MAX_TOOLS}, got {len(chat.tools)}")
    names = [tool.name for tool in chat.tools]
    for index, name in enumerate(names):
        if not _NAME.fullmatch(name):
            raise InvalidParameterError(f"chat.tools[{index}].name", _NAME_RULE)
        if name in names[:index]:
            raise InvalidParameterError(f"chat.tools[{index}].name", f"{name} is there twice")
    _check_choice(chat.tool_choice, names)


def _check_choice(choice: ToolChoice, names: Sequence[str]) -> None:
    if choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED) and not names:
        raise InvalidParameterError("chat.tool_choice", "needs tools")
    if (choice.mode is ToolMode.NAMED) != bool(choice.name):
        raise InvalidParameterError("chat.tool_choice.name", "must be set with TOOL_MODE_NAMED, and only then")
    if choice.name and choice.name not in names:
        raise InvalidParameterError("chat.tool_choice.name", "is none of the tools")


def _check_message(field: str, message: ChatMessage, known_ids: set[str]) -> None:
    """Checks the calls and the id of one message. `known_ids` are those of the calls before it, and grows."""
    if (message.calls or message.reasoning) and message.role is not ChatRole.ASSISTANT:
        raise InvalidParameterError(field, "only the assistant has tool_calls and reasoning")
    for number, call in enumerate(message.calls):
        if not 1 <= len(call.id) <= _MAX_ID_CHARS:
            raise InvalidParameterError(
                f"{field}.tool_calls[{number}].id", f"must be 1 to {_MAX_ID_CHARS} characters long"
            )
        if not _NAME.fullmatch(call.name):
            raise InvalidParameterError(f"{field}.tool_calls[{number}].name", _NAME_RULE)
        known_ids.add(call.id)
    if message.role is ChatRole.TOOL:
        if message.call_id not in known_ids:
            raise InvalidParameterError(f"{field}.tool_call_id", "must be the id of an earlier message's call")
    elif message.call_id:
        raise InvalidParameterError(f"{field}.tool_call_id", "is for messages with ROLE_TOOL only")


def _types_of(parameters: str) -> dict[str, frozenset[str]]:
    """Returns the JSON types of a function's arguments by name; none for an argument without plain types."""
    schema: Any = json.loads(parameters) if parameters else {}
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: _types_in(value) for name, value in properties.items()}


def _types_in(schema: Any) -> frozenset[str]:
    kinds = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kinds, str):
        return frozenset({kinds})
    return frozenset(kind for kind in kinds if isinstance(kind, str)) if isinstance(kinds, list) else frozenset()
