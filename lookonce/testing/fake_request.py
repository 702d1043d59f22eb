"""A generate, score or embed request as a FakeServer received it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self, TypeAlias

from lookonce.common.v1 import common_pb2
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.errors import UnsupportedError
from lookonce.generation import Message, Role, Tool, ToolCall
from lookonce.identity import REQUEST_ID_KEY
from lookonce.images import ImageRef

Method: TypeAlias = Literal["generate", "score", "embed"]
Continuation: TypeAlias = "str | tuple[int, ...]"

_MODES = {decoder_pb2.TOOL_MODE_NONE: "none", decoder_pb2.TOOL_MODE_REQUIRED: "required"}
_ROLES: Mapping[int, Role] = {
    decoder_pb2.ROLE_SYSTEM: "system",
    decoder_pb2.ROLE_USER: "user",
    decoder_pb2.ROLE_ASSISTANT: "assistant",
    decoder_pb2.ROLE_TOOL: "tool",
}


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """One generate, score or embed request, as plain data."""

    # Texts of all messages and parts in reading order, with line ends between them.
    text: str
    # Images in reading order; those that came as bytes have them.
    images: tuple[ImageRef, ...]
    # Sampling options that the caller gave, by their names in the contract.
    options: Mapping[str, object]
    request_id: str
    # Metadata of the call, such as "authorization".
    metadata: Mapping[str, str] = field(repr=False)
    # Functions that the model may call, and the choice among them as the SDK takes it.
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    # Messages of a chat, with their texts alone.
    messages: tuple[Message, ...] = ()
    # Arguments of the chat template, as JSON; empty: none.
    template_arguments: str = ""
    # The client's method; streams are "generate".
    method: Method = "generate"
    # Name of the LoRA adapter; empty: the base model.
    adapter: str = ""
    # Texts or token ids whose likelihood a score request asks for.
    continuations: tuple[Continuation, ...] = ()

    @classmethod
    def of(
        cls,
        params: decoder_pb2.GenerateParams,
        metadata: Mapping[str, str],
        method: Method = "generate",
        continuations: Iterable[decoder_pb2.Continuation] = (),
    ) -> Self:
        """Converts a request. Raises UnsupportedError for videos and for prompts of token ids."""
        if params.HasField("tokens"):
            raise UnsupportedError("a FakeServer offers no prompts of token ids")
        parts = [part for message in params.chat.messages for part in message.parts]
        if any(part.HasField("video") for part in parts):
            raise UnsupportedError("a FakeServer offers no videos")
        sources = [*(part.image for part in parts if part.HasField("image")), *params.text.images]
        texts = [*(part.text for part in parts if part.HasField("text")), params.text.text]
        request_id = params.request_id or metadata.get(REQUEST_ID_KEY, "")
        text, images = "\n".join(filter(None, texts)), tuple(images_of(sources))
        chat = params.chat
        return cls(
            text,
            images,
            _options_of(params.sampling),
            request_id,
            metadata,
            tuple(Tool(tool.name, tool.description, tool.parameters, tool.strict) for tool in chat.tools),
            chat.tool_choice.name or _MODES.get(chat.tool_choice.mode, "auto"),
            tuple(map(_message_of, chat.messages)),
            chat.template_arguments,
            method,
            params.adapter,
            tuple(tuple(one.tokens.token_ids) if one.HasField("tokens") else one.text for one in continuations),
        )


def _message_of(message: decoder_pb2.ChatMessage) -> Message:
    return Message(
        _ROLES[message.role],
        "".join(part.text for part in message.parts),
        tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls),
        message.reasoning,
        message.tool_call_id,
    )


def _options_of(sampling: decoder_pb2.SamplingParams) -> dict[str, object]:
    """Returns the fields that are set, with floats as the caller wrote them: the contract has 32 bits for each."""
    options: dict[str, object] = {}
    for descriptor, value in sampling.ListFields():
        if isinstance(value, float):
            options[descriptor.name] = float(f"{value:.7g}")
        elif isinstance(value, int | str):
            options[descriptor.name] = value
        else:
            options[descriptor.name] = dict(value) if isinstance(value, Mapping) else list(value)
    return options


def images_of(sources: Iterable[common_pb2.ImageSource]) -> Iterable[ImageRef]:
    """Yields references to images of a request, with their bytes if they came."""
    for source in sources:
        max_pixels = source.max_pixels or None
        if source.HasField("data"):
            yield ImageRef.from_bytes(source.data, max_pixels=max_pixels)
        else:
            yield ImageRef.from_digest(source.key.digest, max_pixels=max_pixels)
