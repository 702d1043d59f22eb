"""Parses and answers messages of Anthropic's interface (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from gateway_svc.answers import Ask, End, answer_events, whole_answers
from gateway_svc.apis.api import Context, event
from gateway_svc.apis.content import (
    Part,
    RemoteImage,
    Turn,
    check_size,
    image_part,
    image_places,
    remote_images,
    with_images,
)
from gateway_svc.apis.fields import HONOURED, Field, Fields
from gateway_svc.apis.usage import image_usage
from gateway_svc.errors import anthropic_body_of, renamed
from lookonce.errors import LookonceError
from lookonce.generation import FinishReason, GenerateOptions, Role, Usage
from lookonce.images import ImageRef

_CACHE_NOTE = "Prompts are cached by their content; no marks are needed."
MESSAGE_FIELDS: Mapping[str, Field] = {
    "model": Field("honoured", "The served name; any other one is `model_not_found`."),
    "max_tokens": Field("honoured", "Required."),
    "messages": Field(
        "honoured",
        "Roles user and assistant. Blocks `text` and `image`, with a source `base64` or `url`. `cache_control` of a "
        "block has no effect.",
    ),
    "system": Field("honoured", "A text or blocks of text."),
    "temperature": HONOURED,
    "top_p": HONOURED,
    "top_k": HONOURED,
    "stop_sequences": Field("honoured", "An answer that one of them ends has the stop reason `end_turn`."),
    "stream": HONOURED,
    "metadata": Field("label", "Names the user; has no effect on the answer."),
    "cache_control": Field("label", _CACHE_NOTE),
    "user_profile_id": Field("label", "Names the user; has no effect on the answer."),
    "workspace_id": Field("label", "Names the workspace; has no effect on the answer."),
    "thinking": Field("refused", "Not offered yet.", ({"type": "disabled"},)),
    "tools": Field("refused", "Not offered yet.", ([],)),
    "tool_choice": Field("refused", "Not offered yet.", ({"type": "none"}, {"type": "auto"})),
    "output_config": Field("refused", "Not offered yet.", ({},)),
    "service_tier": Field("refused", "There are no tiers.", ("auto", "standard_only")),
    "speed": Field("refused", "Not offered.", ("standard",)),
    "container": Field("refused", "Nothing is stored."),
    "diagnostics": Field("refused", "Not offered."),
    "inference_geo": Field("refused", "Answers come from where this gateway's decoders are."),
}
_NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "prompt": "messages",
    "chat.messages": "messages",
    "images": "messages",
}
_ROLES: Mapping[str, Role] = {"user": "user", "assistant": "assistant"}
_STOP_REASONS: Mapping[FinishReason, str] = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A parsed request for a message."""

    model: str
    turns: Sequence[Turn]
    options: GenerateOptions
    streams: bool

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> MessagesRequest:
        """Raises InvalidParameterError for fields that are unknown, refused or of a wrong type."""
        fields = Fields.checked(values, MESSAGE_FIELDS)
        options: dict[str, Any] = {
            "max_tokens": fields.needed("max_tokens", fields.integer("max_tokens")),
            "temperature": fields.number("temperature"),
            "top_p": fields.number("top_p"),
            "top_k": fields.integer("top_k"),
            "stop": fields.texts("stop_sequences"),
        }
        turns = [*_system(fields), *_turns(fields)]
        check_size(turns, 1, fields, "messages")
        return cls(
            model=fields.needed("model", fields.text("model")),
            turns=turns,
            options=cast(GenerateOptions, {name: value for name, value in options.items() if value is not None}),
            streams=fields.flag("stream") or False,
        )

    @property
    def remote_images(self) -> Sequence[RemoteImage]:
        """Images that must be fetched."""
        return remote_images(self.turns)

    async def ask(self, fetch: Callable[[str], Awaitable[ImageRef]], max_images: int) -> Ask:
        """Returns the request for the decoder, with fetched images."""
        return Ask([await with_images(self.turns, fetch, max_images)], self.options)

    async def whole(self, ask: Ask, context: Context) -> dict[str, Any]:
        """Returns a message with the whole answer."""
        (generation,) = await whole_answers(context.client, ask, context.request_id, context.timeout_s)
        content = [{"type": "text", "text": generation.text}]
        return {
            **_head(context),
            "content": content,
            "stop_reason": _STOP_REASONS[generation.finish_reason],
            "usage": _usage(generation.usage),
        }

    async def events(self, ask: Ask, context: Context) -> AsyncGenerator[bytes]:
        """Yields the events of a message."""
        has_begun = False
        async for one in answer_events(context.client, ask, context.request_id, context.timeout_s):
            if not has_begun:
                has_begun = True
                # The counts come with the last event but one.
                usage = {"input_tokens": 0, "output_tokens": 0}
                yield _event("message_start", message={**_head(context), "content": [], "usage": usage})
                yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
            if isinstance(one, End):
                delta = {"stop_reason": _STOP_REASONS[one.generation.finish_reason], "stop_sequence": None}
                yield _event("content_block_stop", index=0)
                yield _event("message_delta", delta=delta, usage=_usage(one.generation.usage))
                yield _event("message_stop")
            else:
                yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": one.text})

    def renamed(self, error: LookonceError) -> LookonceError:
        """Returns an error of the decoder with the name of the request's field."""
        return renamed(error, _NAMES, image_places(self.turns))

    def failure(self, error: LookonceError) -> bytes:
        """Returns the event that ends a message with an error."""
        return event(anthropic_body_of(error), "error")


def _system(fields: Fields) -> list[Turn]:
    given = fields.raw("system")
    if given is None:
        return []
    return [Turn("system", _parts(given, "system", takes_images=False, fields=fields, name="system"), "system")]


def _turns(fields: Fields) -> list[Turn]:
    messages = fields.needed("messages", fields.array("messages"))
    if not messages:
        raise fields.wrong("messages", "is empty")
    return [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _turn(value: Any, where: str) -> Turn:
    fields = Fields.of(value, where).only("role", "content")
    name = fields.needed("role", fields.text("role"))
    if name not in _ROLES:
        raise fields.wrong("role", "must be user or assistant")
    parts = _parts(fields.raw("content"), f"{where}.content", takes_images=True, fields=fields, name="content")
    return Turn(_ROLES[name], parts, where)


def _parts(given: Any, where: str, *, takes_images: bool, fields: Fields, name: str) -> list[Part]:
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise fields.wrong(name, "must be a text or a list of blocks")
    return [_part(Fields.of(block, f"{where}[{index}]"), takes_images) for index, block in enumerate(given)]


def _part(block: Fields, takes_images: bool) -> Part:
    kind = block.text("type")
    if kind == "text":
        block.only("type", "text", "cache_control")
        return block.needed("text", block.text("text"))
    if kind != "image" or not takes_images:
        raise block.wrong("type", "must be text or image" if takes_images else "must be text")
    block.only("type", "source", "cache_control")
    source = block.inner("source")
    if source.text("type") == "base64":
        source.only("type", "media_type", "data")
        data = source.needed("data", source.text("data"))
        return image_part(source, f"data:{source.text('media_type') or ''};base64,{data}", None, None)
    if source.text("type") != "url":
        raise source.wrong("type", "must be base64 or url")
    source.only("type", "url")
    return image_part(source, source.needed("url", source.text("url")), None, None)


def _head(context: Context) -> dict[str, Any]:
    return {
        "id": f"msg_{context.request_id}",
        "type": "message",
        "role": "assistant",
        "model": context.model,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _event(kind: str, **values: Any) -> bytes:
    return event({"type": kind, **values}, kind)


def _usage(usage: Usage) -> dict[str, Any]:
    """Returns token counts. Tokens of the prompt that were cached are not among `input_tokens`, as in Anthropic's."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_prompt_tokens,
        "cache_read_input_tokens": usage.cached_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "lookonce": image_usage([usage]),
    }
