"""Parses and answers chat completions (https://platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_svc.answers import Ask, End, answer_events, whole_answers
from gateway_svc.apis.api import Context, event
from gateway_svc.apis.chat_messages import MESSAGES_NOTE, chat_turns
from gateway_svc.apis.logprobs import chat_logprobs
from gateway_svc.apis.parsing.content import RemoteImage, Turn, check_size, places_of, remote_images, with_images
from gateway_svc.apis.parsing.fields import EXTENSIONS, HONOURED, LABEL, Field, Fields
from gateway_svc.apis.parsing.model_options import (
    EFFORT_NOTE,
    TEMPLATE_ARGUMENTS,
    TEMPLATE_FIELD,
    ModelOptions,
    reasoning_of_effort,
    template_arguments,
)
from gateway_svc.apis.parsing.sampling import SAMPLING, num_answers, sampling_options
from gateway_svc.apis.parsing.tools import PARALLEL_NOTE, TOOLS_NOTE, chat_tools
from gateway_svc.apis.usage import StreamedUsage, UsageOptions, chat_usage
from gateway_svc.errors import body_of, renamed
from lookonce.decoder_info import ModelInfo
from lookonce.errors import LookonceError
from lookonce.generation import Delta, GenerateOptions, Generation, TokenLogprobs, ToolCallDelta
from lookonce.images import ImageRef

CHAT_FIELDS: Mapping[str, Field] = {
    "model": Field("honoured", "The served name; any other one is `model_not_found`."),
    "messages": Field("honoured", MESSAGES_NOTE),
    **SAMPLING,
    "max_completion_tokens": HONOURED,
    "max_tokens": Field("honoured", "The older name of max_completion_tokens."),
    "logprobs": Field("honoured", "Entries for all tokens, those of reasoning and calls among them."),
    "top_logprobs": Field("honoured", "At most the decoder's max_logprobs."),
    "response_format": Field(
        "honoured", "`text`, `json_object` and `json_schema`, which always holds, as with `strict`."
    ),
    "stream": HONOURED,
    "stream_options": Field("honoured", "`include_usage`; with it `continuous_usage_stats`, as vLLM has it."),
    "user": LABEL,
    "safety_identifier": LABEL,
    "prompt_cache_key": Field("label", "Prompts are cached by their content; no key is needed."),
    "prompt_cache_options": Field("refused", "Prompts are cached by their content."),
    "prompt_cache_retention": Field("refused", "The cache keeps what is used."),
    "metadata": Field("refused", "Nothing is stored.", ({},)),
    "store": Field("refused", "Nothing is stored.", (False,)),
    "service_tier": Field("refused", "There are no tiers.", ("auto", "default")),
    "modalities": Field("refused", "Answers are text.", (["text"],)),
    "reasoning_effort": Field("honoured", EFFORT_NOTE),
    TEMPLATE_FIELD: TEMPLATE_ARGUMENTS,
    "verbosity": Field("refused", "Not offered.", ("medium",)),
    "tools": Field("honoured", TOOLS_NOTE),
    "tool_choice": Field(
        "honoured", "`auto`, `none`, `required` or one function. `allowed_tools` is refused: send only these tools."
    ),
    "parallel_tool_calls": Field("honoured", PARALLEL_NOTE),
    "functions": Field("refused", "The older form of `tools`: send `tools`.", ([],)),
    "function_call": Field(
        "refused", "The older form of `tool_choice`: send `tools` and `tool_choice`.", ("none", "auto")
    ),
    "audio": Field("refused", "Answers are text."),
    "moderation": Field("refused", "Not offered."),
    "prediction": Field("refused", "Not offered; decoders guess from the prompt by themselves."),
    "web_search_options": Field("refused", "Not offered."),
    **EXTENSIONS,
}


_NAMES: Mapping[str, str] = {
    "max_tokens": "max_completion_tokens",
    "logprobs": "top_logprobs",
    "json_schema": "response_format",
    "prompt": "messages",
    "chat.messages": "messages",
    "images": "messages",
    "chat.tools": "tools",
    "chat.tool_choice": "tool_choice",
    "chat.template_arguments": TEMPLATE_FIELD,
    # These stand behind the place of a function or a call.
    ".name": ".function.name",
    ".parameters": ".function.parameters",
    ".arguments": ".function.arguments",
    ".parts": ".content",
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A parsed request for chat completions."""

    model: str
    turns: Sequence[Turn]
    options: GenerateOptions
    model_options: ModelOptions
    num_each: int
    # Number of alternatives for each token; None: no log-probabilities.
    num_top: int | None
    streams: bool
    usage_options: UsageOptions
    # Fields of the request by those of the decoder, where they differ.
    names: Mapping[str, str]

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> ChatRequest:
        """Raises InvalidParameterError for fields that are unknown, refused or of a wrong type."""
        fields = Fields.checked(values, CHAT_FIELDS)
        num_top = _num_top(fields)
        options = sampling_options(fields)
        if (max_tokens := _max_tokens(fields)) is not None:
            options["max_tokens"] = max_tokens
        if num_top is not None:
            options["logprobs"] = num_top
        if (schema := json_schema_of(fields, "response_format", "json_schema")) is not None:
            options["json_schema"] = schema
        options.update(chat_tools(fields))
        streams = fields.flag("stream") or False
        turns, num_each = chat_turns(fields), num_answers(fields)
        check_size(turns, options.get("tools") or (), num_each, fields, "messages")
        return cls(
            model=fields.needed("model", fields.text("model")),
            turns=turns,
            options=options,
            model_options=ModelOptions(
                reasoning_of_effort(fields.text("reasoning_effort"), "reasoning_effort"), template_arguments(fields)
            ),
            num_each=num_each,
            num_top=num_top,
            streams=streams,
            usage_options=UsageOptions.parse(fields, streams=streams),
            names={**_NAMES, **({} if fields.raw("max_tokens") is None else {"max_tokens": "max_tokens"})},
        )

    @property
    def remote_images(self) -> Sequence[RemoteImage]:
        """Images that must be fetched."""
        return remote_images(self.turns)

    async def ask(self, fetch: Callable[[str], Awaitable[ImageRef]], info: ModelInfo) -> Ask:
        """Returns the request for the decoder, with fetched images."""
        options = self.model_options.added_to(self.options, self.turns, info)
        return Ask([await with_images(self.turns, fetch, info.max_images_per_prompt)], options, self.num_each)

    async def whole(self, ask: Ask, context: Context) -> dict[str, Any]:
        """Returns a chat completion with all answers."""
        generations = await whole_answers(context.client, ask, context.request_id, context.timeout_s)
        choices = [
            {
                "index": index,
                "message": _message(generation),
                "logprobs": await self._logprobs(generation.logprobs, context),
                "finish_reason": generation.finish_reason,
            }
            for index, generation in enumerate(generations)
        ]
        usage = chat_usage([generation.usage for generation in generations], ask.num_each)
        return {**_head(context, "chat.completion"), "choices": choices, "usage": usage}

    async def events(self, ask: Ask, context: Context) -> AsyncGenerator[bytes]:
        """Yields chunks of a chat completion, and `[DONE]`."""
        head = _head(context, "chat.completion.chunk")
        usage = StreamedUsage(ask, self.usage_options)
        has_begun = False
        async for one in answer_events(context.client, ask, context.request_id, context.timeout_s):
            usage.note(one)
            head |= usage.beside_choices
            if not has_begun:
                has_begun = True
                for index in range(ask.num_answers):
                    yield _chunk(head, index, {"role": "assistant", "content": "", "refusal": None})
            logprobs = await self._logprobs(one.logprobs, context)
            if not isinstance(one, End):
                yield _chunk(head, one.index, _delta(one.delta), logprobs)
                continue
            yield _chunk(head, one.index, {}, logprobs, one.generation.finish_reason)
        if self.usage_options.is_included:
            yield event({**head, "choices": [], "usage": usage.total})
        yield b"data: [DONE]\n\n"

    def renamed(self, error: LookonceError) -> LookonceError:
        """Returns an error of the decoder with the name of the request's field."""
        return renamed(error, {**self.names, **places_of(self.turns)})

    def failure(self, error: LookonceError) -> bytes:
        """Returns the event that ends an answer with an error."""
        return event(body_of(error))

    async def _logprobs(self, tokens: Sequence[TokenLogprobs], context: Context) -> dict[str, Any] | None:
        if self.num_top is None or not tokens:
            return None
        return {"content": await chat_logprobs(tokens, self.num_top, context.token_texts), "refusal": None}


_ANY_OBJECT = '{"type": "object"}'
_SCHEMA_FIELDS = ("name", "description", "strict", "schema")


def json_schema_of(fields: Fields, name: str, nested: str | None) -> str | None:
    """Returns the JSON schema of a format for answers, as text; None for plain text.

    `nested` is the field of the format that holds the schema; None: the format itself holds it.
    """
    if fields.raw(name) is None:
        return None
    format_fields = fields.inner(name)
    kind = format_fields.text("type")
    if kind == "text":
        format_fields.only("type")
        return None
    if kind == "json_object":
        format_fields.only("type")
        return _ANY_OBJECT
    if kind != "json_schema":
        raise format_fields.wrong("type", "must be text, json_object or json_schema")
    if nested is None:
        schema_fields = format_fields.only("type", *_SCHEMA_FIELDS)
    else:
        schema_fields = format_fields.only("type", nested).inner(nested).only(*_SCHEMA_FIELDS)
    # These have no effect: every schema is kept to.
    schema_fields.text("name")
    schema_fields.text("description")
    schema_fields.flag("strict")
    schema = schema_fields.raw("schema")
    if not isinstance(schema, dict | bool):
        raise schema_fields.wrong("schema", "must be a JSON schema")
    return json.dumps(schema)


def _max_tokens(fields: Fields) -> int | None:
    newer, older = fields.integer("max_completion_tokens"), fields.integer("max_tokens")
    if newer is not None and older is not None and newer != older:
        raise fields.wrong("max_tokens", "differs from max_completion_tokens")
    return older if newer is None else newer


def _num_top(fields: Fields) -> int | None:
    is_wanted, number = fields.flag("logprobs"), fields.integer("top_logprobs")
    if number is not None and not is_wanted:
        raise fields.wrong("top_logprobs", "needs logprobs: true")
    return (number or 0) if is_wanted else None


def _message(generation: Generation) -> dict[str, Any]:
    content = None if generation.tool_calls and not generation.text else generation.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if generation.reasoning:
        message["reasoning_content"] = generation.reasoning
    if generation.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in generation.tool_calls
        ]
    return message


def _delta(delta: Delta) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if delta.reasoning:
        values["reasoning_content"] = delta.reasoning
    if delta.text:
        values["content"] = delta.text
    if delta.tool_calls:
        values["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
    return values


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    function = {"arguments": call.arguments}
    if not call.id:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, **function}}


def _head(context: Context, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{context.request_id}",
        "object": kind,
        "created": context.created,
        "model": context.model,
    }


def _chunk(
    head: Mapping[str, Any],
    index: int,
    delta: Mapping[str, Any],
    logprobs: Mapping[str, Any] | None = None,
    finish_reason: str | None = None,
) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    return event({**head, "choices": [choice]})
