"""Parses and answers messages of Anthropic's interface (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from gateway_svc.answers import Ask, End, answer_events, whole_answers
from gateway_svc.apis.api import Context, event
from gateway_svc.apis.message_blocks import BLOCKS_NOTE, message_turns
from gateway_svc.apis.message_output import MessageOutput, blocks_of
from gateway_svc.apis.parsing.content import RemoteImage, Turn, check_size, places_of, remote_images, with_images
from gateway_svc.apis.parsing.fields import HONOURED, Field, Fields
from gateway_svc.apis.parsing.model_options import ModelOptions, Reasoning
from gateway_svc.apis.parsing.tools import TOOLS_NOTE, message_tools
from gateway_svc.apis.usage import image_usage
from gateway_svc.errors import anthropic_body_of, renamed
from lookonce.decoder_info import ModelInfo
from lookonce.errors import LookonceError
from lookonce.generation import FinishReason, GenerateOptions, Usage
from lookonce.images import ImageRef

_CACHE_NOTE = "Prompts are cached by their content; no marks are needed."
MESSAGE_FIELDS: Mapping[str, Field] = {
    "model": Field("honoured", "The served name; any other one is `model_not_found`."),
    "max_tokens": Field("honoured", "Required."),
    "messages": Field("honoured", BLOCKS_NOTE),
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
    "thinking": Field(
        "honoured",
        "`disabled` and `adaptive` turn reasoning off and on where the chat template takes `enable_thinking`, and have "
        "no effect elsewhere. Other types are refused: reasoning has no budget of its own.",
    ),
    "tools": Field(
        "honoured",
        f"{TOOLS_NOTE} In a whole answer, arguments that are no JSON object are the `input` "
        '`{"INVALID_JSON": "…"}`; streams have them as they are.',
    ),
    "tool_choice": Field(
        "honoured", "`auto`, `any`, `tool`, `none`. `disable_parallel_tool_use` ends the answer behind its first call."
    ),
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
    "chat.tools": "tools",
    "chat.tool_choice": "tool_choice",
    # These stand behind the place of a function, a message or a call.
    ".parameters": ".input_schema",
    ".arguments": ".input",
    ".tool_call_id": ".tool_use_id",
    ".parts": ".content",
}
_STOP_REASONS: Mapping[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "abort": "end_turn",
    "tool_calls": "tool_use",
}
_THINKING: Mapping[str, bool] = {"disabled": False, "adaptive": True}


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A parsed request for a message."""

    model: str
    turns: Sequence[Turn]
    options: GenerateOptions
    model_options: ModelOptions
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
        tool_options = message_tools(fields)
        turns = message_turns(fields)
        check_size(turns, tool_options.get("tools") or (), 1, fields, "messages")
        return cls(
            model=fields.needed("model", fields.text("model")),
            turns=turns,
            options=cast(
                GenerateOptions, {name: value for name, value in options.items() if value is not None} | tool_options
            ),
            model_options=ModelOptions(_reasoning(fields)),
            streams=fields.flag("stream") or False,
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
        """Returns a message with the whole answer."""
        (generation,) = await whole_answers(context.client, ask, context.request_id, context.timeout_s)
        return {
            **_head(context),
            "content": blocks_of(generation),
            "stop_reason": _STOP_REASONS[generation.finish_reason],
            "usage": _usage(generation.usage),
        }

    async def events(self, ask: Ask, context: Context) -> AsyncGenerator[bytes]:
        """Yields the events of a message."""
        output = MessageOutput()
        has_begun = False
        async for one in answer_events(context.client, ask, context.request_id, context.timeout_s):
            if not has_begun:
                has_begun = True
                # The counts come with the last event but one.
                usage = {"input_tokens": 0, "output_tokens": 0}
                yield _event("message_start", message={**_head(context), "content": [], "usage": usage})
            for kind, values in output.end() if isinstance(one, End) else output.add(one.delta):
                yield _event(kind, **values)
            if isinstance(one, End):
                delta = {"stop_reason": _STOP_REASONS[one.generation.finish_reason], "stop_sequence": None}
                yield _event("message_delta", delta=delta, usage=_usage(one.generation.usage))
                yield _event("message_stop")

    def renamed(self, error: LookonceError) -> LookonceError:
        """Returns an error of the decoder with the name of the request's field."""
        return renamed(error, {**_NAMES, **places_of(self.turns)})

    def failure(self, error: LookonceError) -> bytes:
        """Returns the event that ends a message with an error."""
        return event(anthropic_body_of(error), "error")


def _reasoning(fields: Fields) -> Reasoning:
    if fields.raw("thinking") is None:
        return Reasoning()
    thinking = fields.inner("thinking")
    kind = thinking.needed("type", thinking.text("type"))
    if kind not in _THINKING:
        raise thinking.wrong("type", "must be disabled or adaptive; reasoning has no budget of its own here")
    if thinking.only("type", "display").raw("display") not in (None, "summarized"):
        raise thinking.wrong("display", "must be summarized; reasoning is never left out")
    return Reasoning(is_wanted=_THINKING[kind], where="thinking")


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
