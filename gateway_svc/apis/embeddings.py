"""Parses and answers requests for embeddings (https://platform.openai.com/docs/api-reference/embeddings)."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from gateway_svc.answers import Ask
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
from gateway_svc.apis.vectors import Vector, VectorForm, placed_in, vectors
from gateway_svc.errors import body_of, renamed
from lookonce.decoder_info import ModelInfo
from lookonce.errors import LookonceError
from lookonce.generation import GenerateOptions, Pooling, TextPrompt, TokenPrompt
from lookonce.images import ImageRef

EMBEDDING_FIELDS: Mapping[str, Field] = {
    "model": Field("honoured", "The served name or an adapter's; any other one is `model_not_found`."),
    "input": Field(
        "honoured",
        "A text or a list of token ids of this model, or a list of up to 2,048 of these. Texts are taken as they are, "
        "without the chat template; control tokens in them count.",
    ),
    "messages": Field("honoured", "Extension: a chat in place of `input`, as for chat completions, with its pictures."),
    "pooling": Field("honoured", "Extension: `last`, the last token's hidden state, or `mean`. Default: `last`."),
    "encoding_format": Field("honoured", "`float` or `base64`. The vectors have length 1."),
    "dimensions": Field("refused", "Vectors have the model's hidden size."),
    "user": LABEL,
    **{name: EXTENSIONS[name] for name in ("priority", "cache_salt", "bypass_prefix_cache")},
}
# OpenAI takes as many.
_MAX_INPUTS = 2048
_MAX_ID = (1 << 32) - 1
_POOLINGS: tuple[Pooling, ...] = ("last", "mean")
_TEXT_FIELDS = ("text.text", "text", "tokens.token_ids", "token_ids", "prompt")
_CHAT_FIELDS: Mapping[str, str] = {"chat.messages": "messages", "prompt": "messages", "images": "messages"}


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A parsed request for embeddings."""

    model: str
    # Texts, or ids of tokens. Empty: the prompt is the chat.
    inputs: Sequence[str | Sequence[int]]
    # Whether `input` is a list of inputs, so that errors say which one.
    is_list: bool
    turns: Sequence[Turn]
    form: VectorForm
    options: GenerateOptions

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> EmbeddingRequest:
        """Raises InvalidParameterError for fields that are unknown, refused or of a wrong type."""
        fields = Fields.checked(values, EMBEDDING_FIELDS)
        encoding, pooling = fields.text("encoding_format"), fields.text("pooling")
        if encoding not in (None, "float", "base64"):
            raise fields.wrong("encoding_format", "must be float or base64")
        if pooling not in (None, *_POOLINGS):
            raise fields.wrong("pooling", f"must be {' or '.join(_POOLINGS)}")
        has_input, has_chat = (fields.raw(name) is not None for name in ("input", "messages"))
        if has_input == has_chat:
            raise fields.wrong("input", "cannot be combined with messages" if has_input else "is missing")
        turns = chat_turns(fields) if has_chat else []
        check_size(turns, (), 1, fields, "messages")
        inputs, is_list = _inputs(fields) if has_input else ([], False)
        options: dict[str, Any] = {
            "priority": fields.integer("priority"),
            "cache_salt": fields.text("cache_salt"),
            "bypass_prefix_cache": fields.flag("bypass_prefix_cache"),
        }
        return cls(
            model=fields.needed("model", fields.text("model")),
            inputs=inputs,
            is_list=is_list,
            turns=turns,
            form=VectorForm(pooling or _POOLINGS[0], encoding == "base64"),
            options=cast(GenerateOptions, {name: value for name, value in options.items() if value is not None}),
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

    async def whole(self, ask: Ask, context: Context) -> bytes:
        """Returns a list with the embedding of each input."""
        found = await vectors(ask, self.form, context, self._placed)
        return _listed(found, context)

    async def events(self, ask: Ask, context: Context) -> AsyncGenerator[bytes]:
        """Yields the list as one event; nobody asks for it."""
        yield b"data: " + await self.whole(ask, context) + b"\n\n"

    def renamed(self, error: LookonceError) -> LookonceError:
        """Returns an error of the decoder with the name of the request's field."""
        return renamed(error, {**_CHAT_FIELDS, **places_of(self.turns)}) if self.turns else error

    def failure(self, error: LookonceError) -> bytes:
        """Returns the event that ends an answer with an error."""
        return event(body_of(error))

    def _placed(self, error: LookonceError, index: int) -> LookonceError:
        """Returns an error with the name of the input, if it is one's fault."""
        if self.turns:
            return error
        place = f"input[{index}]" if self.is_list else "input"
        return placed_in(error, dict.fromkeys(_TEXT_FIELDS, place), place)


def _inputs(fields: Fields) -> tuple[list[str | list[int]], bool]:
    """Returns texts and lists of token ids, and whether they were a list. Raises InvalidParameterError."""
    value = fields.raw("input")
    is_list = isinstance(value, list) and not (value and isinstance(value[0], int))
    many = value if is_list else [value]
    if not 1 <= len(many) <= _MAX_INPUTS:
        raise fields.wrong("input", f"must be 1 to {_MAX_INPUTS} texts or lists of token ids, got {len(many)}")
    for each in many:
        is_ids = isinstance(each, list) and all(_is_id(one) for one in each)
        if not (isinstance(each, str) or is_ids) or not each:
            raise fields.wrong("input", "must be a text or a list of token ids, or a list of these, and none is empty")
    if sum(map(len, many)) > MAX_CHARACTERS:
        raise fields.wrong("input", f"is too long; all inputs may have {MAX_CHARACTERS} characters and ids")
    return many, is_list


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_ID


def _listed(found: Sequence[Vector], context: Context) -> bytes:
    """Returns the answer as JSON: the vectors are written already."""
    usage = embedding_usage([one.usage for one in found])
    head = json.dumps({"object": "list", "model": context.model, "usage": usage})
    data = b",".join(
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, one.text) for index, one in enumerate(found)
    )
    return head[:-1].encode() + b',"data":[' + data + b"]}"
