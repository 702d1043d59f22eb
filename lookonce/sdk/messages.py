"""Converts prompts to the requests of both clients, and chooses the images to send as bytes. Calls no server."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from lookonce.common.v1 import common_pb2
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb2
from lookonce.decoder_info import ModelInfo
from lookonce.errors import EmbeddingNotCachedError, InvalidParameterError
from lookonce.generation import GenerateOptions, Message, Pooling, Prompt, RequestOptions, Role, TextPrompt, TokenPrompt
from lookonce.image_file import FRAMES_PER_PAIR
from lookonce.images import ImageLike, ImageRef, as_image, as_images
from lookonce.sdk.routing.affinity import affinity_of
from lookonce.sdk.tools import CHAT_OPTIONS, add_calls, add_chat_options, json_text
from lookonce.sdk.values import assign, fill
from lookonce.videos import Video

# Up to this size, sending the image costs less than a round trip to learn that the server lacks it.
SMALL_IMAGE_BYTES = 64 << 10

_ROLES: Mapping[Role, decoder_pb2.Role.ValueType] = {
    "system": decoder_pb2.ROLE_SYSTEM,
    "user": decoder_pb2.ROLE_USER,
    "assistant": decoder_pb2.ROLE_ASSISTANT,
    "tool": decoder_pb2.ROLE_TOOL,
}
_POOLINGS: Mapping[str, decoder_pb2.Pooling.ValueType] = {
    "last": decoder_pb2.POOLING_LAST,
    "mean": decoder_pb2.POOLING_MEAN,
}
# A message, and its parts with hashed images.
_Turn: TypeAlias = tuple[Message, list[str | ImageRef | Video]]
# A text, token ids or a chat.
_Content: TypeAlias = "str | tuple[int, ...] | list[_Turn]"
_REQUEST_FIELDS = ("request_id", "priority", "cache_salt", "adapter", "bypass_prefix_cache")
# Endings of the names of image files, by which a path that was given as text is noticed.
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic", ".heif", ".avif")
_MAX_PATH_LENGTH = 4096
# Options of which a request has at most one.
_CONSTRAINTS = frozenset({"json_schema", "regex", "grammar", "json_object", "choice"})
_CONTAINER_FIELDS = ("stop", "stop_token_ids", "logit_bias")


class PreparedPrompt:
    """A prompt with hashed images, and the choice of those to send as bytes.

    Small images are sent as bytes at once, larger ones as digests first, and as bytes if the server lacks them.
    """

    def __init__(self, prompt: Prompt, images: Sequence[ImageLike], options: RequestOptions | GenerateOptions) -> None:
        """Reads and hashes files, so keep it off event loops. Raises InvalidParameterError and OSError."""
        if unknown := options.keys() - GenerateOptions.__annotations__.keys():
            raise TypeError(f"unknown option {min(unknown)!r}")
        self._options = {name: value for name, value in options.items() if value is not None}
        if isinstance(prompt, TextPrompt | TokenPrompt):
            self._content: _Content = _as_text(prompt) if isinstance(prompt, TextPrompt) else _as_ids(prompt)
            if images:
                raise InvalidParameterError("images", f"must be those of the {type(prompt).__name__}")
            # Images and videos in reading order.
            self._visuals: list[ImageRef | Video] = [*as_images(prompt.images)]
        else:
            turns = _as_turns(prompt, images)
            self._content = turns
            self._visuals = [part for _, parts in turns for part in parts if not isinstance(part, str)]
        if not self._visuals and not _has_text(self._content):
            raise InvalidParameterError("prompt", "is empty")
        self._inline = {index for index, visual in enumerate(self._visuals) if _travels_at_once(visual)}

    @property
    def affinity(self) -> bytes:
        """Equal for prompts that begin alike; see routing/affinity.py."""
        digest = _images_of(self._visuals[0])[0].digest if self._visuals else None
        return affinity_of(digest, _first_texts(self._content))

    @property
    def adapter(self) -> str:
        """Name of the LoRA adapter; empty: the base model."""
        adapter = self._options.get("adapter", "")
        return adapter if isinstance(adapter, str) else ""

    def params(self) -> decoder_pb2.GenerateParams:
        """Returns the request with the bytes of the images that are to be sent."""
        params = decoder_pb2.GenerateParams(sampling=_sampling(self._options))
        for name in _REQUEST_FIELDS:
            if name in self._options:
                assign(params, name, self._options[name])
        try:
            self._add_prompt(params)
        except UnicodeEncodeError:
            raise InvalidParameterError("prompt", "has characters that are no Unicode text (surrogates)") from None
        return params

    def score_request(
        self, continuations: Sequence[str | Sequence[int]], num_logprobs: int | None
    ) -> decoder_pb2.ScoreRequest:
        """Returns the request for the likelihoods of continuations, with the bytes of the images that are to be sent.

        Raises InvalidParameterError for continuations that are neither texts nor token ids, and for sampling options.
        """
        if isinstance(continuations, str):
            raise InvalidParameterError("continuations", "must be a list of texts or of token ids, not a str")
        request = decoder_pb2.ScoreRequest(params=self._without_sampling("score"))
        if num_logprobs is not None:
            assign(request, "logprobs", num_logprobs)
        for continuation in continuations:
            added = request.continuations.add()
            if isinstance(continuation, str):
                assign(added, "text", continuation)
            else:
                added.tokens.SetInParent()
                fill(added.tokens, "token_ids", continuation)
        return request

    def embed_request(self, pooling: Pooling, *, normalize: bool) -> decoder_pb2.EmbedRequest:
        """Returns the request for the embedding, with the bytes of the images that are to be sent.

        Raises InvalidParameterError for another pooling and for sampling options.
        """
        if pooling not in _POOLINGS:
            raise InvalidParameterError("pooling", f"must be one of {', '.join(_POOLINGS)}, not {pooling!r}")
        return decoder_pb2.EmbedRequest(
            params=self._without_sampling("embed"), pooling=_POOLINGS[pooling], keep_length=not normalize
        )

    def _without_sampling(self, name: str) -> decoder_pb2.GenerateParams:
        params = self.params()
        if given := params.sampling.ListFields():
            raise InvalidParameterError(given[0][0].name, f"is not for `{name}`, which samples nothing")
        params.ClearField("sampling")
        return params

    def tokenize_request(self) -> decoder_pb2.TokenizeRequest:
        """Returns the request for the prompt's tokens, with the bytes of the images that are to be sent."""
        params = self.params()
        if isinstance(self._content, str):
            return decoder_pb2.TokenizeRequest(text=params.text)
        if isinstance(self._content, tuple):
            raise InvalidParameterError("prompt", "has its tokens already")
        return decoder_pb2.TokenizeRequest(chat=params.chat)

    def _add_prompt(self, params: decoder_pb2.GenerateParams) -> None:
        index = 0
        if not isinstance(self._content, list):
            if given := CHAT_OPTIONS & self._options.keys():
                raise InvalidParameterError(min(given), "is for chats, not for a TextPrompt or a TokenPrompt")
            prompt: decoder_pb2.TextPrompt | decoder_pb2.TokenPrompt
            if isinstance(self._content, str):
                prompt = params.text
                prompt.text = self._content
            else:
                prompt = params.tokens
                fill(prompt, "token_ids", self._content)
            for index, image in enumerate(self._visuals):
                assert isinstance(image, ImageRef), "such a prompt has no videos"
                prompt.images.append(image_source(image, as_bytes=index in self._inline, in_prompt=True))
            return
        add_chat_options(params.chat, self._options)
        for turn, parts in self._content:
            message = params.chat.messages.add(role=_ROLES[turn.role])
            assign(message, "tool_call_id", turn.tool_call_id)
            assign(message, "reasoning", turn.reasoning)
            add_calls(message, turn.tool_calls)
            for part in parts:
                if isinstance(part, str):
                    message.parts.add(text=part)
                    continue
                if isinstance(part, Video):
                    message.parts.add(video=_video_source(part, as_bytes=index in self._inline))
                else:
                    message.parts.add(image=image_source(part, as_bytes=index in self._inline, in_prompt=True))
                index += 1

    def missing(self, error: EmbeddingNotCachedError, info: ModelInfo) -> list[bytes]:
        """Returns the digests of the images that the server lacks, those of a video's frames included.

        Raises an error equal to `error` if the caller gave a missing image by digest only.
        """
        return [image.digest for index in self._asked_for(error, info) for image in _images_of(self._visuals[index])]

    def supply(self, error: EmbeddingNotCachedError, info: ModelInfo) -> list[ImageRef]:
        """Sends the images that the server lacks as bytes from now on; returns those to encode ahead of the request.

        If the missing images exceed half of a message, all of them must be encoded ahead. Videos always stay in the
        request. Raises an error equal to `error` if the caller gave a missing image by digest only.
        """
        asked = self._asked_for(error, info)
        if sum(_num_bytes(self._visuals[index]) for index in asked) <= info.max_message_bytes // 2:
            self._inline |= asked
            return []
        self._inline |= {index for index in asked if isinstance(self._visuals[index], Video)}
        visuals = [self._visuals[index] for index in sorted(asked)]
        images = [visual for visual in visuals if isinstance(visual, ImageRef)]
        if info.rows_depend_on_image_count and sum(isinstance(visual, ImageRef) for visual in self._visuals) > 1:
            return [replace(image, beside_others=True) for image in images]
        return images

    def _asked_for(self, error: EmbeddingNotCachedError, info: ModelInfo) -> set[int]:
        """Returns the indexes of the images and videos that the server lacks.

        Raises the error anew if one has no bytes. This frame refers to `error`, whose traceback would refer to this
        frame: a cycle that would keep the images in memory until the next garbage collection.
        """
        # The server counts each image and each entry of frames as one. This is the index in `_visuals` of each.
        visual_of = [index for index, visual in enumerate(self._visuals) for _ in range(_num_entries(visual, info))]
        if any(index >= len(visual_of) for index in error.indexes):
            raise equal_error(error)
        asked = {visual_of[index] for index in error.indexes}
        asked = asked or set(range(len(self._visuals))) - self._inline
        if not asked or not all(_has_bytes(self._visuals[index]) for index in asked):
            raise equal_error(error)
        return asked


def check_one_answer(number: int | None) -> None:
    """Refuses several answers in a stream. Raises InvalidParameterError."""
    if number is not None and number != 1:
        raise InvalidParameterError("n", "a stream gives one answer; ask `generate` for several")


def equal_error(error: EmbeddingNotCachedError) -> EmbeddingNotCachedError:
    """Returns an error that is equal and has no traceback, which would refer to a call and its images."""
    equal = EmbeddingNotCachedError(error.message, indexes=error.indexes)
    equal.request_id = error.request_id
    return equal


def image_source(image: ImageRef, *, as_bytes: bool, in_prompt: bool) -> common_pb2.ImageSource:
    """Converts an image to protobuf, as bytes with their expected digest or as the digest alone."""
    source = common_pb2.ImageSource(beside_others=image.beside_others and not in_prompt)
    if as_bytes and image.data is not None:
        source.data = image.data
        source.expected_digest = image.digest
    else:
        source.key.CopyFrom(key_of(image))
    assign_max_pixels(source, image.max_pixels)
    return source


def _video_source(video: Video, *, as_bytes: bool) -> decoder_pb2.VideoSource:
    """Converts a video to protobuf, its frames as bytes with their expected digests or as digests alone."""
    source = decoder_pb2.VideoSource(
        frames=[image_source(frame, as_bytes=as_bytes, in_prompt=True) for frame in video.frames]
    )
    if video.fps is not None:
        assign(source, "fps", video.fps)
    assign_max_pixels(source, video.max_pixels)
    if video.size is not None:
        assign(source.size, "width", video.size[0])
        assign(source.size, "height", video.size[1])
    return source


def _has_text(content: _Content) -> bool:
    if isinstance(content, tuple):
        return bool(content)
    texts = [content] if isinstance(content, str) else [part for _, parts in content for part in parts]
    return any(isinstance(text, str) and text.strip() for text in texts)


def _first_texts(content: _Content) -> Iterator[str]:
    """Yields the texts up to the first message of the user; token ids as numbers."""
    if not isinstance(content, list):
        yield content if isinstance(content, str) else " ".join(map(str, content))
        return
    for turn, parts in content:
        yield from (part for part in parts if isinstance(part, str))
        if turn.role == "user":
            return


def _as_text(prompt: TextPrompt) -> str:
    text: object = prompt.text
    if not isinstance(text, str):
        raise InvalidParameterError("prompt", f"the text of a TextPrompt must be a str, not {type(text).__name__}")
    return text


def _as_ids(prompt: TokenPrompt) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, prompt.token_ids))
    except TypeError:
        raise InvalidParameterError("prompt", "the ids of a TokenPrompt must be whole numbers") from None


def _as_turns(prompt: str | Sequence[Message], images: Sequence[ImageLike]) -> list[_Turn]:
    """Returns role and parts of each message. A question is one user message, with its images before its text."""
    given: object = prompt
    if isinstance(given, str):
        return [(Message("user", given), [*as_images(images), given])]
    if isinstance(given, bytes | bytearray | memoryview) or not isinstance(given, Iterable):
        raise _wrong_prompt(given)
    if images:
        raise InvalidParameterError("images", "must be parts of the messages if the prompt is a list of messages")
    return [_as_turn(message) for message in given]


def _as_turn(message: object) -> _Turn:
    if not isinstance(message, Message):
        raise _wrong_prompt(message)
    _check_role(message.role)
    # The calls of a message without text are all that it has.
    return message, [] if message.content == "" and message.tool_calls else _as_parts(message.content)


def _wrong_prompt(given: object) -> InvalidParameterError:
    if isinstance(given, list | tuple) and given:
        return InvalidParameterError("prompt", f"is a list of {type(given[0]).__name__}; a chat is a list of Message")
    return InvalidParameterError(
        "prompt", f"must be a str, a TextPrompt, a TokenPrompt or a list of Message, not {type(given).__name__}"
    )


def _check_role(role: Role) -> None:
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidParameterError("role", f"must be one of {', '.join(_ROLES)}, not {role!r}")


def _as_parts(content: str | Sequence[Any]) -> list[str | ImageRef | Video]:
    given: object = content
    if isinstance(given, str):
        return [given]
    if isinstance(given, bytes | bytearray | memoryview) or not isinstance(given, Iterable):
        raise InvalidParameterError("content", f"must be a text or a list of parts, not {type(given).__name__}")
    return [_checked_text(part) if isinstance(part, str) else _as_visual(part) for part in given]


def _as_visual(part: Any) -> ImageRef | Video:
    return part if isinstance(part, Video) else as_image(part)


def _checked_text(text: str) -> str:
    """Returns a text. Raises InvalidParameterError for what is rather meant as an image."""
    if len(text) <= _MAX_PATH_LENGTH and text.lower().endswith(_IMAGE_SUFFIXES) and os.path.isfile(text):
        raise InvalidParameterError(
            "content", f"{text!r} is text here; for the image, give ImageRef.from_file({text!r})"
        )
    if text[:11].lower() == "data:image/":
        raise InvalidParameterError("content", "a data URL is text here; for the image, give the bytes")
    return text


def _sampling(options: Mapping[str, object]) -> decoder_pb2.SamplingParams:
    """Sets only the given options, so that zero and unset differ. Raises InvalidParameterError for unusable values."""
    sampling = decoder_pb2.SamplingParams()
    # A program may always say whether it wants a JSON object.
    options = {name: value for name, value in options.items() if not (name == "json_object" and value is False)}
    if len(constraints := _CONSTRAINTS & options.keys()) > 1:
        raise InvalidParameterError(min(constraints), f"cannot be combined with {max(constraints)}")
    for name, value in options.items():
        if name in _REQUEST_FIELDS or name in CHAT_OPTIONS or name == "timeout_s":
            continue
        if name in _CONTAINER_FIELDS:
            fill(sampling, name, value)
        elif name == "choice":
            sampling.choice.SetInParent()
            fill(sampling.choice, "texts", value)
        elif name == "json_schema" and isinstance(value, Mapping):
            assign(sampling, name, json_text(name, value))
        else:
            assign(sampling, name, value)
    return sampling


def assign_max_pixels(message: Any, max_pixels: int | None) -> None:
    """Sets the option of an image or of a selection of images. Raises InvalidParameterError for a wrong value."""
    if max_pixels is not None:
        assign(message, "max_pixels", max_pixels)


def _num_entries(visual: ImageRef | Video, info: ModelInfo) -> int:
    return visual.num_entries(info.frames_per_entry or FRAMES_PER_PAIR) if isinstance(visual, Video) else 1


def _travels_at_once(visual: ImageRef | Video) -> bool:
    """Tells whether to send bytes at once: for small files, and for videos without a `size`, which need them."""
    if not _has_bytes(visual):
        return False
    return _num_bytes(visual) <= SMALL_IMAGE_BYTES or (isinstance(visual, Video) and visual.size is None)


def _has_bytes(visual: ImageRef | Video) -> bool:
    return all(image.data is not None for image in _images_of(visual))


def _num_bytes(visual: ImageRef | Video) -> int:
    return sum(len(image.data or b"") for image in _images_of(visual))


def _images_of(visual: ImageRef | Video) -> Sequence[ImageRef]:
    return visual.frames if isinstance(visual, Video) else (visual,)


def key_of(image: ImageRef) -> common_pb2.ContentKey:
    return common_pb2.ContentKey(digest=image.digest, algorithm=common_pb2.HASH_ALGORITHM_SHA256)
