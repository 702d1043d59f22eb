"""Parses and answers requests for responses (https://platform.openai.com/docs/api-reference/responses).

Nothing is stored, so each request has the whole conversation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_svc.answers import Ask, End, answer_events, whole_answers
from gateway_svc.apis.api import Context, event
from gateway_svc.apis.chat import json_schema_of
from gateway_svc.apis.content import (
    Part,
    RemoteImage,
    Turn,
    check_size,
    image_part,
    image_places,
    part_fields,
    remote_images,
    role_of,
    turn_of,
    with_images,
)
from gateway_svc.apis.fields import EXTENSIONS, HONOURED, LABEL, Field, Fields
from gateway_svc.apis.logprobs import chat_logprobs
from gateway_svc.apis.sampling import sampling_options
from gateway_svc.apis.usage import responses_usage
from gateway_svc.errors import renamed
from lookonce.errors import LookonceError
from lookonce.generation import FinishReason, GenerateOptions, TokenLogprobs, Usage
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
}
RESPONSE_FIELDS: Mapping[str, Field] = {
    "model": Field("honoured", "The served name; any other one is `model_not_found`."),
    "input": Field(
        "honoured",
        "A text, or messages with roles system, developer (as system), user, assistant and parts `input_text`, "
        "`output_text` and `input_image` (a data URL or an address, and `detail`). Other items are refused.",
    ),
    "instructions": Field("honoured", "A first message of the role system."),
    "temperature": HONOURED,
    "top_p": HONOURED,
    "max_output_tokens": HONOURED,
    "top_logprobs": Field("honoured", "At most the decoder's max_logprobs. Needs no `include`."),
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
    "tools": Field("refused", "Not offered yet.", ([],)),
    "tool_choice": Field("refused", "Not offered yet.", ("none", "auto")),
    "parallel_tool_calls": Field("refused", "Not offered yet.", (True, False)),
    "max_tool_calls": Field("refused", "Not offered yet."),
    "reasoning": Field("refused", "Not offered yet.", ({}, {"effort": None}, {"effort": "none"})),
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
        text_format: object = {"type": "text"}
        if fields.raw("text") is not None:
            text = Fields.of(fields.raw("text"), "text").only("format", "verbosity")
            if text.raw("verbosity") not in (None, "medium"):
                raise text.wrong("verbosity", "is not supported")
            if (schema := json_schema_of(text, "format", None)) is not None:
                options["json_schema"] = schema
            text_format = text.raw("format") or text_format
        metadata = _metadata(fields)
        instructions = fields.text("instructions")
        first = [] if instructions is None else [Turn("system", [instructions], "instructions")]
        turns = [*first, *_turns(fields)]
        check_size(turns, 1, fields, "input")
        return cls(
            model=fields.needed("model", fields.text("model")),
            turns=turns,
            options=options,
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
            },
            progress=_Progress(),
        )

    @property
    def remote_images(self) -> Sequence[RemoteImage]:
        """Images that must be fetched."""
        return remote_images(self.turns)

    async def ask(self, fetch: Callable[[str], Awaitable[ImageRef]], max_images: int) -> Ask:
        """Returns the request for the decoder, with fetched images."""
        return Ask([await with_images(self.turns, fetch, max_images)], self.options)

    async def whole(self, ask: Ask, context: Context) -> dict[str, Any]:
        """Returns a response that has ended."""
        (generation,) = await whole_answers(context.client, ask, context.request_id, context.timeout_s)
        part = _text_part(generation.text, await self._logprobs(generation.logprobs, context))
        return self._response(context, generation.finish_reason, part, generation.usage)

    async def events(self, ask: Ask, context: Context) -> AsyncGenerator[bytes]:
        """Yields the events of a response."""
        progress = self.progress

        def numbered(kind: str, **values: Any) -> bytes:
            progress.num_events += 1
            return event({"type": kind, **values, "sequence_number": progress.num_events - 1}, kind)

        place = {"item_id": _message_id(context), "output_index": 0, "content_index": 0}
        pieces: list[str] = []
        logprobs: list[dict[str, Any]] = []
        has_begun = False
        async for one in answer_events(context.client, ask, context.request_id, context.timeout_s):
            if not has_begun:
                has_begun = True
                beginning = self._response(context, None, None, None)
                yield numbered("response.created", response=beginning)
                yield numbered("response.in_progress", response=beginning)
                yield numbered("response.output_item.added", output_index=0, item=_message(context, None, None))
                yield numbered("response.content_part.added", **place, part=_text_part("", []))
            new_logprobs = await self._logprobs(one.logprobs, context)
            logprobs += new_logprobs
            if not isinstance(one, End):
                pieces.append(one.text)
                yield numbered("response.output_text.delta", **place, delta=one.text, logprobs=new_logprobs)
                continue
            if new_logprobs:
                # The last tokens have no text, for example the one that ends the answer.
                yield numbered("response.output_text.delta", **place, delta="", logprobs=new_logprobs)
            part = _text_part("".join(pieces), logprobs)
            reason = one.generation.finish_reason
            yield numbered("response.output_text.done", **place, text=part["text"], logprobs=logprobs)
            yield numbered("response.content_part.done", **place, part=part)
            yield numbered("response.output_item.done", output_index=0, item=_message(context, reason, part))
            response = self._response(context, reason, part, one.generation.usage)
            yield numbered(f"response.{response['status']}", response=response)

    def renamed(self, error: LookonceError) -> LookonceError:
        """Returns an error of the decoder with the name of the request's field."""
        return renamed(error, _NAMES, image_places(self.turns))

    def failure(self, error: LookonceError) -> bytes:
        """Returns the event that ends a response with an error."""
        values = {"type": "error", "code": error.reason, "message": error.message}
        number = self.progress.num_events
        return event({**values, "param": error.metadata.get("field"), "sequence_number": number}, "error")

    async def _logprobs(self, tokens: Sequence[TokenLogprobs], context: Context) -> list[dict[str, Any]]:
        if self.num_top is None or not tokens:
            return []
        return await chat_logprobs(tokens, self.num_top, context.token_texts)

    def _response(
        self, context: Context, reason: FinishReason | None, part: Mapping[str, Any] | None, usage: Usage | None
    ) -> dict[str, Any]:
        is_cut = reason in ("length", "abort")
        details = {"reason": "max_output_tokens" if reason == "length" else "aborted"}
        return {
            "id": f"resp_{context.request_id}",
            "object": "response",
            "created_at": context.created,
            "status": _status(reason),
            "error": None,
            "incomplete_details": details if is_cut else None,
            "model": context.model,
            "output": [] if part is None else [_message(context, reason, part)],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": None if usage is None else responses_usage(usage),
            **self.repeated,
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


def _turns(fields: Fields) -> list[Turn]:
    given = fields.raw("input")
    if isinstance(given, str):
        return [Turn("user", [given])]
    items = fields.needed("input", fields.array("input"))
    if not items:
        raise fields.wrong("input", "is empty")
    return [_turn(item, f"input[{index}]") for index, item in enumerate(items)]


def _turn(item: Any, where: str) -> Turn:
    fields = Fields.of(item, where)
    if fields.text("type") not in (None, "message"):
        raise fields.wrong("type", "must be message")
    # An answer of before, sent back as it was, has an id and a status.
    fields.only("type", "role", "content", "id", "status")
    return turn_of(fields, role_of(fields), where, _part)


def _part(value: Any, where: str, index: int) -> Part:
    fields = part_fields(value, where, index)
    kind = fields.text("type")
    if kind in ("input_text", "output_text"):
        return fields.only("type", "text", "annotations", "logprobs").needed("text", fields.text("text"))
    if kind != "input_image":
        raise fields.wrong("type", "must be input_text, output_text or input_image")
    fields.only("type", "image_url", "detail", "max_pixels")
    url = fields.needed("image_url", fields.text("image_url"))
    return image_part(fields, url, fields.text("detail"), fields.integer("max_pixels"))


def _text_part(text: str, logprobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _message(context: Context, reason: FinishReason | None, part: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "id": _message_id(context),
        "type": "message",
        "role": "assistant",
        "status": _status(reason),
        "content": [] if part is None else [part],
    }


def _message_id(context: Context) -> str:
    return f"msg_{context.request_id}"


def _status(reason: FinishReason | None) -> str:
    if reason is None:
        return "in_progress"
    return "completed" if reason == "stop" else "incomplete"
