"""Parses and answers requests for responses (https://platform.openai.com/docs/api-reference/responses).

Nothing is stored, so each request has the whole conversation.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from gateway_svc.answers import Ask, End, answer_events, whole_answers
from gateway_svc.apis.api import Context, event
from gateway_svc.apis.chat import json_schema_of
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
from gateway_svc.apis.parsing.sampling import sampling_options
from gateway_svc.apis.parsing.tools import PARALLEL_NOTE, TOOLS_NOTE, response_tools
from gateway_svc.apis.response_items import INPUT_NOTE, response_turns
from gateway_svc.apis.response_output import OutputEvent, ResponseOutput, status_of
from gateway_svc.apis.usage import responses_usage
from gateway_svc.errors import renamed
from lookonce.decoder_info import ModelInfo
from lookonce.errors import LookonceError
from lookonce.generation import FinishReason, GenerateOptions, Generation, TokenLogprobs, Tool, Usage
from lookonce.images import ImageRef

_INCLUDED_LOGPROBS = "message.output_text.logprobs"
# OpenAI's limits on metadata.
_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_NAMES: Mapping[str, str] = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "json_schema": "text.format",
    "prompt": "input",
    "chat.messages": "input",
    "images": "input",
    "chat.tools": "tools",
    "chat.tool_choice": "tool_choice",
    "chat.template_arguments": TEMPLATE_FIELD,
    # These stand behind the place of a message or a call.
    ".id": ".call_id",
    ".tool_call_id": ".call_id",
    ".parts": ".content",
}
RESPONSE_FIELDS: Mapping[str, Field] = {
    "model": Field("honoured", "The served name; any other one is `model_not_found`."),
    "input": Field("honoured", INPUT_NOTE),
    "instructions": Field("honoured", "A first message of the role system."),
    "temperature": HONOURED,
    "top_p": HONOURED,
    "max_output_tokens": HONOURED,
    "top_logprobs": Field("honoured", "At most the decoder's max_logprobs. Needs no `include`. For tokens of texts."),
    "include": Field("honoured", f"`{_INCLUDED_LOGPROBS}`; other values are refused."),
    "text": Field("honoured", "`format`: as response_format of chats."),
    "stream": HONOURED,
    "user": LABEL,
    "safety_identifier": LABEL,
    "prompt_cache_key": Field("label", "Prompts are cached by their content; no key is needed."),
    "metadata": Field("label", "Is returned with the response."),
    "store": Field("refused", "Nothing is stored; `false` is accepted.", (False,)),
    "previous_response_id": Field("refused", "Nothing is stored: send the whole conversation."),
    "conversation": Field("refused", "Nothing is stored: send the whole conversation."),
    "background": Field("refused", "Nothing is stored.", (False,)),
    "background_options": Field("refused", "Nothing is stored."),
    "context_management": Field("refused", "Not offered.", ([],)),
    "truncation": Field("refused", "Prompts are never shortened.", ("disabled",)),
    "tools": Field("honoured", f"{TOOLS_NOTE} Without `strict`, a function is not."),
    "tool_choice": Field(
        "honoured", "`auto`, `none`, `required` or one function. `allowed_tools` is refused: send only these tools."
    ),
    "parallel_tool_calls": Field("honoured", PARALLEL_NOTE),
    "max_tool_calls": Field("refused", "It is for tools that the server would run."),
    "reasoning": Field("honoured", f"`effort`: {EFFORT_NOTE} `summary` and others are refused."),
    TEMPLATE_FIELD: TEMPLATE_ARGUMENTS,
    "service_tier": Field("refused", "There are no tiers.", ("auto", "default")),
    "stream_options": Field("refused", "Not offered.", ({}, {"include_obfuscation": False})),
    "prompt": Field("refused", "Nothing is stored."),
    "prompt_cache_options": Field("refused", "Prompts are cached by their content."),
    "prompt_cache_retention": Field("refused", "The cache keeps what is used."),
    "moderation": Field("refused", "Not offered."),
    "image": Field("refused", "Answers are text."),
    "access_programs": Field("refused", "Not offered."),
    **EXTENSIONS,
}


@dataclass(slots=True)
class _Progress:
    """The number of events that were made of a response."""

    num_events: int = 0


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A parsed request for a response."""

    model: str
    turns: Sequence[Turn]
    options: GenerateOptions
    model_options: ModelOptions
    # Number of alternatives for each token; None: no log-probabilities.
    num_top: int | None
    streams: bool
    # Fields of the request that the response repeats.
    repeated: Mapping[str, Any]
    progress: _Progress

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> ResponseRequest:
        """Raises InvalidParameterError for fields that are unknown, refused or of a wrong type."""
        fields = Fields.checked(values, RESPONSE_FIELDS)
        options = sampling_options(fields)
        if (max_tokens := fields.integer("max_output_tokens")) is not None:
            options["max_tokens"] = max_tokens
        num_top = _num_top(fields)
        if num_top is not None:
            options["logprobs"] = num_top
        options.update(response_tools(fields))
        text_format = _text_format(fields, options)
        effort = _effort(fields)
        metadata = _metadata(fields)
        instructions = fields.text("instructions")
        first = [] if instructions is None else [Turn.of_text("system", instructions, "instructions")]
        turns = [*first, *response_turns(fields)]
        tools = options.get("tools") or ()
        check_size(turns, tools, 1, fields, "input")
        return cls(
            model=fields.needed("model", fields.text("model")),
            turns=turns,
            options=options,
            model_options=ModelOptions(reasoning_of_effort(effort, "reasoning.effort"), template_arguments(fields)),
            num_top=num_top,
            streams=fields.flag("stream") or False,
            repeated={
                "instructions": instructions,
                "max_output_tokens": max_tokens,
                "metadata": metadata,
                "temperature": options.get("temperature"),
                "top_p": options.get("top_p"),
                "top_logprobs": num_top or 0,
                "text": {"format": text_format},
                "reasoning": {"effort": effort, "summary": None},
                "tools": [_repeated_tool(tool) for tool in tools],
                "tool_choice": fields.raw("tool_choice") or "auto",
                "parallel_tool_calls": fields.flag("parallel_tool_calls") is not False,
            },
            progress=_Progress(),
        )

    @property
    def remote_images(self) -> Sequence[RemoteImage]:
        """Images that must be fetched."""
        return remote_images(self.turns)

    async def ask(self, fetch: Callable[[str], Awaitable[ImageRef]], info: ModelInfo) -> Ask:
        """Returns the request for the decoder, with fetched images."""
        options = self.model_options.added_to(self.options, self.turns, info)
        return Ask([await with_images(self.turns, fetch, info.max_images_per_prompt)], options)

    async def whole(self, ask: Ask, context: Context) -> dict[str, Any]:
        """Returns a response that has ended."""
        output = ResponseOutput(context.request_id)
        if self.num_top is None:
            (generation,) = await whole_answers(context.client, ask, context.request_id, context.timeout_s)
            output.take(generation)
        else:
            # The stream tells which tokens are those of a text.
            async with aclosing(self._output_events(ask, context, output)) as events:
                (generation,) = [one async for one in events if isinstance(one, Generation)]
        return self._ended(context, output, generation)

    async def events(self, ask: Ask, context: Context) -> AsyncGenerator[bytes]:
        """Yields the events of a response."""
        output = ResponseOutput(context.request_id)
        has_begun = False
        async with aclosing(self._output_events(ask, context, output)) as events:
            async for one in events:
                if not has_begun:
                    has_begun = True
                    beginning = self._response(context, None, [], None)
                    yield self._event("created", response=beginning)
                    yield self._event("in_progress", response=beginning)
                if isinstance(one, Generation):
                    response = self._ended(context, output, one)
                    yield self._event(response["status"], response=response)
                else:
                    yield self._event(one[0], **one[1])

    async def _output_events(
        self, ask: Ask, context: Context, output: ResponseOutput
    ) -> AsyncGenerator[OutputEvent | Generation]:
        """Yields the events of the output's items, and at last the whole answer."""
        async for one in answer_events(context.client, ask, context.request_id, context.timeout_s):
            if not isinstance(one, End):
                logprobs = await self._logprobs(one.logprobs if one.delta.text else (), context)
                for found in output.add(one.delta, logprobs):
                    yield found
                continue
            logprobs = await self._logprobs(one.logprobs, context)
            for found in output.end(one.generation.finish_reason, logprobs):
                yield found
            yield one.generation

    def _event(self, kind: str, **values: Any) -> bytes:
        name = f"response.{kind}"
        self.progress.num_events += 1
        return event({"type": name, **values, "sequence_number": self.progress.num_events - 1}, name)

    def renamed(self, error: LookonceError) -> LookonceError:
        """Returns an error of the decoder with the name of the request's field."""
        return renamed(error, {**_NAMES, **places_of(self.turns)})

    def failure(self, error: LookonceError) -> bytes:
        """Returns the event that ends a response with an error."""
        values = {"type": "error", "code": error.reason, "message": error.message}
        number = self.progress.num_events
        return event({**values, "param": error.metadata.get("field"), "sequence_number": number}, "error")

    async def _logprobs(self, tokens: Sequence[TokenLogprobs], context: Context) -> list[dict[str, Any]]:
        if self.num_top is None or not tokens:
            return []
        return await chat_logprobs(tokens, self.num_top, context.token_texts)

    def _ended(self, context: Context, output: ResponseOutput, generation: Generation) -> dict[str, Any]:
        return self._response(context, generation.finish_reason, output.items, generation.usage)

    def _response(
        self, context: Context, reason: FinishReason | None, items: Sequence[Mapping[str, Any]], usage: Usage | None
    ) -> dict[str, Any]:
        is_cut = reason in ("length", "abort")
        details = {"reason": "max_output_tokens" if reason == "length" else "aborted"}
        return {
            "id": f"resp_{context.request_id}",
            "object": "response",
            "created_at": context.created,
            "status": status_of(reason),
            "error": None,
            "incomplete_details": details if is_cut else None,
            "model": context.model,
            "output": items,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if usage is None else responses_usage(usage),
            **self.repeated,
        }


def _text_format(fields: Fields, options: GenerateOptions) -> object:
    """Returns the format of texts, and adds its schema to the options."""
    if fields.raw("text") is None:
        return {"type": "text"}
    text = fields.inner("text").only("format", "verbosity")
    if text.raw("verbosity") not in (None, "medium"):
        raise text.wrong("verbosity", "is not supported")
    if (schema := json_schema_of(text, "format", None)) is not None:
        options["json_schema"] = schema
    return text.raw("format") or {"type": "text"}


def _effort(fields: Fields) -> str | None:
    if fields.raw("reasoning") is None:
        return None
    return fields.inner("reasoning").only("effort").text("effort")


def _repeated_tool(tool: Tool) -> dict[str, Any]:
    parameters = None if tool.parameters is None else json.loads(str(tool.parameters))
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": parameters,
        "strict": tool.strict,
    }


def _metadata(fields: Fields) -> dict[str, str]:
    value = fields.raw("metadata")
    if value is None:
        return {}
    is_right = isinstance(value, dict) and len(value) <= _MAX_METADATA
    if not is_right or not all(isinstance(one, str) for one in value.values()):
        raise fields.wrong("metadata", f"must have at most {_MAX_METADATA} texts")
    if any(len(key) > _MAX_KEY or len(one) > _MAX_VALUE for key, one in value.items()):
        raise fields.wrong("metadata", f"has a key above {_MAX_KEY} or a value above {_MAX_VALUE} characters")
    metadata: dict[str, str] = value
    return metadata


def _num_top(fields: Fields) -> int | None:
    included = fields.array("include") or []
    for one in included:
        if one != _INCLUDED_LOGPROBS:
            raise fields.wrong("include", f"may have {_INCLUDED_LOGPROBS} only")
    number = fields.integer("top_logprobs")
    return number if number is not None else (0 if included else None)
