"""Parses and answers requests for embeddings (https://platform.openai.com/docs/api-reference/embeddings)."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from gateway_svc.answers import Ask, gathered
from gateway_svc.apis.api import Context, event
from gateway_svc.apis.chat_messages import chat_turns
from gateway_svc.apis.parsing.content import (
    MAX_CHARACTERS,
    RemoteImage,
    Turn,
    check_size,
    places_of,
    remote_images,
    with_images,
)
from gateway_svc.apis.parsing.fields import EXTENSIONS, LABEL, Field, Fields
from gateway_svc.apis.usage import embedding_usage
from gateway_svc.errors import body_of, renamed
from lookonce.decoder_info import ModelInfo
from lookonce.errors import DeadlineError, LookonceError
from lookonce.generation import GenerateOptions, Pooling, PromptEmbedding, RequestOptions, TextPrompt, TokenPrompt
from lookonce.images import ImageRef

EMBEDDING_FIELDS: Mapping[str, Field] = {
    "model": Field("honoured", "The served name; any other one is `model_not_found`."),
    "input": Field(
        "honoured",
        "A text or a list of token ids, or a list of up to 2,048 of these. Control tokens in a text count.",
    ),
    "messages": Field(
        "honoured", "Extension: a chat in place of `input`, as in `/v1/chat/completions`, with its pictures."
    ),
    "pooling": Field("honoured", "Extension: `last`, the last token's hidden state, or `mean`. Default: `last`."),
    "encoding_format": Field("honoured", "`float` or `base64`. The vectors have length 1."),
    "dimensions": Field("refused", "Vectors have the model's hidden size."),
    "user": LABEL,
    **{name: EXTENSIONS[name] for name in ("priority", "cache_salt", "bypass_prefix_cache")},
}
# As many as OpenAI takes.
_MAX_INPUTS = 2048
_INPUTS_AT_ONCE = 16
_POOLINGS: tuple[Pooling, ...] = ("last", "mean")
_TEXT_FIELDS = ("text.text", "text", "tokens.token_ids", "prompt")
_CHAT_FIELDS: Mapping[str, str] = {"chat.messages": "messages", "prompt": "messages", "images": "messages"}


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A parsed request for embeddings."""

    model: str
    # Texts, or ids of tokens. Empty: the prompt is the chat.
    inputs: Sequence[str | Sequence[int]]
    turns: Sequence[Turn]
    pooling: Pooling
    options: GenerateOptions
    is_base64: bool

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> EmbeddingRequest:
        """Raises InvalidParameterError for fields that are unknown, refused or of a wrong type."""
        fields = Fields.checked(values, EMBEDDING_FIELDS)
        encoding, pooling = fields.text("encoding_format") or "float", fields.text("pooling") or _POOLINGS[0]
        if encoding not in ("float", "base64"):
            raise fields.wrong("encoding_format", "must be float or base64")
        if pooling not in _POOLINGS:
            raise fields.wrong("pooling", f"must be {' or '.join(_POOLINGS)}")
        has_input, has_chat = (fields.raw(name) is not None for name in ("input", "messages"))
        if has_input == has_chat:
            raise fields.wrong("input", "is missing" if not has_input else "cannot be combined with messages")
        turns = chat_turns(fields) if has_chat else []
        check_size(turns, (), 1, fields, "messages")
        options: dict[str, Any] = {
            "priority": fields.integer("priority"),
            "cache_salt": fields.text("cache_salt"),
            "bypass_prefix_cache": fields.flag("bypass_prefix_cache"),
        }
        return cls(
            model=fields.needed("model", fields.text("model")),
            inputs=_inputs(fields) if has_input else (),
            turns=turns,
            pooling=cast(Pooling, pooling),
            options=cast(GenerateOptions, {name: value for name, value in options.items() if value is not None}),
            is_base64=encoding == "base64",
        )

    @property
    def streams(self) -> bool:
        """Embeddings come as one object."""
        return False

    @property
    def remote_images(self) -> Sequence[RemoteImage]:
        """Images that must be fetched."""
        return remote_images(self.turns)

    async def ask(self, fetch: Callable[[str], Awaitable[ImageRef]], info: ModelInfo) -> Ask:
        """Returns the prompts, with fetched images."""
        if not self.inputs:
            return Ask([await with_images(self.turns, fetch, info.max_images_per_prompt)], self.options)
        return Ask(
            [TextPrompt(each) if isinstance(each, str) else TokenPrompt(each) for each in self.inputs], self.options
        )

    async def whole(self, ask: Ask, context: Context) -> dict[str, Any]:
        """Returns a list with the embedding of each input. If one fails, the others end and its error is raised."""
        found = await self._embedded(ask, context)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._written(one.embedding)}
                for index, one in enumerate(found)
            ],
            "model": context.model,
            "usage": embedding_usage([one.usage for one in found]),
        }

    async def events(self, ask: Ask, context: Context) -> AsyncGenerator[bytes]:
        """Yields the list as one event; nobody asks for it."""
        yield event(await self.whole(ask, context))

    def renamed(self, error: LookonceError) -> LookonceError:
        """Returns an error of the decoder with the name of the request's field."""
        names = {**_CHAT_FIELDS, **places_of(self.turns)} if self.turns else dict.fromkeys(_TEXT_FIELDS, "input")
        return renamed(error, names)

    def failure(self, error: LookonceError) -> bytes:
        """Returns the event that ends an answer with an error."""
        return event(body_of(error))

    async def _embedded(self, ask: Ask, context: Context) -> list[PromptEmbedding]:
        at_once = asyncio.Semaphore(_INPUTS_AT_ONCE)
        deadline_s = time.monotonic() + context.timeout_s

        async def one(index: int) -> PromptEmbedding:
            async with at_once:
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    raise DeadlineError("the deadline passed before all inputs were computed; send fewer")
                options = cast(RequestOptions, ask.options_of(index, context.request_id, remaining_s))
                try:
                    return await context.client.embed(ask.prompt_of(index), pooling=self.pooling, **options)
                except LookonceError as error:
                    if len(self.inputs) < 2:
                        raise
                    raise renamed(error, dict.fromkeys(_TEXT_FIELDS, f"input[{index}]")) from None

        return await gathered(one(index) for index in range(ask.num_answers))

    def _written(self, embedding: Sequence[float]) -> str | list[float]:
        if not self.is_base64:
            return list(embedding)
        return base64.b64encode(struct.pack(f"<{len(embedding)}f", *embedding)).decode()


def _inputs(fields: Fields) -> list[str | list[int]]:
    """Returns texts and lists of token ids. Raises InvalidParameterError."""
    value = fields.raw("input")
    many = value if isinstance(value, list) and not (value and isinstance(value[0], int)) else [value]
    if not 1 <= len(many) <= _MAX_INPUTS:
        raise fields.wrong("input", f"must be 1 to {_MAX_INPUTS} texts or lists of token ids, got {len(many)}")
    for each in many:
        is_ids = isinstance(each, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in each)
        if not (isinstance(each, str) or is_ids) or not each:
            raise fields.wrong("input", "must be a text or a list of token ids, or a list of these, and none is empty")
    if sum(map(len, many)) > MAX_CHARACTERS:
        raise fields.wrong("input", f"is too long; all inputs together may have {MAX_CHARACTERS} characters")
    return many
