"""Parses the decoder's protobuf messages into plain types. Checks only what these types cannot express."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Sequence, Sized

from decoder_svc.prompt.prompt_spec import (
    CachedImage,
    ChatMessage,
    ChatPrompt,
    ChatRole,
    ImagePart,
    ImageSource,
    InlineImage,
    PromptSpec,
    TextPart,
    TextPrompt,
    TokenPrompt,
    VideoFrame,
    VideoPart,
    VideoSource,
)
from decoder_svc.prompt.sampling_check import MAX_CHOICES, MAX_LOGIT_BIAS_ENTRIES, MAX_STOP_TOKEN_IDS, SamplingSpec
from decoder_svc.scheduling.request import CacheScope
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind, Pooling
from decoder_svc.tools.tool import Tool, ToolCall, ToolChoice, ToolMode
from lookonce.common.v1 import common_pb2
from lookonce.content_key import ProcessorOptions, Tenant, parse_digest
from lookonce.decoder.v1 import decoder_service_pb2
from lookonce.errors import ContextTooLongError, InvalidParameterError
from lookonce.families.video import DEFAULT_FPS, MAX_FPS, MIN_FPS

_ROLES = {
    decoder_service_pb2.ROLE_SYSTEM: ChatRole.SYSTEM,
    decoder_service_pb2.ROLE_USER: ChatRole.USER,
    decoder_service_pb2.ROLE_ASSISTANT: ChatRole.ASSISTANT,
    decoder_service_pb2.ROLE_TOOL: ChatRole.TOOL,
}
_MODES = {
    decoder_service_pb2.TOOL_MODE_UNSPECIFIED: ToolMode.AUTO,
    decoder_service_pb2.TOOL_MODE_AUTO: ToolMode.AUTO,
    decoder_service_pb2.TOOL_MODE_NONE: ToolMode.NONE,
    decoder_service_pb2.TOOL_MODE_REQUIRED: ToolMode.REQUIRED,
    decoder_service_pb2.TOOL_MODE_NAMED: ToolMode.NAMED,
}
_POOLINGS = {
    decoder_service_pb2.POOLING_UNSPECIFIED: Pooling.LAST,
    decoder_service_pb2.POOLING_LAST: Pooling.LAST,
    decoder_service_pb2.POOLING_MEAN: Pooling.MEAN,
}
_CACHE_SALT = re.compile(r"[A-Za-z0-9._-]{0,128}")
_MIN_FRAMES = 2
# Most elements of a list: chat messages with their parts and video frames, images, or stop strings. The number is far
# above the servers' limits, and small enough to be parsed on the event loop (a few milliseconds). Without it a message
# of 32 MiB could hold millions.
_MAX_ELEMENTS = 4096
# Most texts of which an answer is one.
_MAX_CHOICES = 1024
_SHA256 = (common_pb2.HASH_ALGORITHM_UNSPECIFIED, common_pb2.HASH_ALGORITHM_SHA256)


def parse_prompt(
    message: decoder_service_pb2.GenerateParams | decoder_service_pb2.TokenizeRequest, max_context_tokens: int
) -> PromptSpec:
    """Returns the prompt of a request.

    Raises InvalidParameterError that names the field, and ContextTooLongError for more token ids than
    `max_context_tokens`.
    """
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidParameterError("prompt", "is missing; set one of its kinds")
    if kind == "chat":
        return parse_chat(message.chat)
    if kind == "text":
        return TextPrompt(message.text.text, _images("text.images", message.text.images))
    assert isinstance(message, decoder_service_pb2.GenerateParams), "only GenerateParams has token prompts"
    num_tokens = len(message.tokens.token_ids)
    if num_tokens > max_context_tokens:
        raise ContextTooLongError(f"the prompt has {num_tokens} tokens, the context {max_context_tokens}")
    return TokenPrompt(tuple(message.tokens.token_ids), _images("tokens.images", message.tokens.images))


def parse_chat(chat: decoder_service_pb2.ChatPrompt) -> ChatPrompt:
    """Returns a conversation. Raises InvalidParameterError that names the field."""
    num_elements = len(chat.messages)
    for message in chat.messages[:_MAX_ELEMENTS]:
        num_elements += len(message.parts) + len(message.tool_calls)
        num_elements += sum(len(part.video.frames) for part in message.parts[:_MAX_ELEMENTS])
        if num_elements > _MAX_ELEMENTS:
            break
    if num_elements > _MAX_ELEMENTS:
        raise InvalidParameterError(
            "chat.messages", f"must have at most {_MAX_ELEMENTS} messages, parts, calls and video frames together"
        )
    _check_number("chat.tools", chat.tools)
    mode = _MODES.get(chat.tool_choice.mode)
    if mode is None:
        raise InvalidParameterError("chat.tool_choice.mode", "must be auto, none, required or named")
    return ChatPrompt(
        tuple(_message(f"chat.messages[{i}]", message) for i, message in enumerate(chat.messages)),
        tuple(Tool(tool.name, tool.description, tool.parameters, tool.strict) for tool in chat.tools),
        ToolChoice(mode, chat.tool_choice.name, chat.tool_choice.single_call),
        chat.template_arguments,
    )


def parse_pooling(request: decoder_service_pb2.EmbedRequest) -> Pooling:
    """Returns the tokens whose hidden states are used. Raises InvalidParameterError."""
    if request.params.HasField("sampling"):
        raise InvalidParameterError("params.sampling", "must be unset: nothing is sampled")
    pooling = _POOLINGS.get(request.pooling)
    if pooling is None:
        raise InvalidParameterError("pooling", "must be last or mean")
    return pooling


def parse_continuations(request: decoder_service_pb2.ScoreRequest) -> list[str | tuple[int, ...]]:
    """Returns texts and token ids of continuations. Raises InvalidParameterError."""
    if request.params.HasField("sampling"):
        raise InvalidParameterError("params.sampling", "must be unset: nothing is sampled")
    if not 1 <= len(request.continuations) <= MAX_CHOICES:
        raise InvalidParameterError("continuations", f"must be 1 to {MAX_CHOICES}, got {len(request.continuations)}")
    found: list[str | tuple[int, ...]] = []
    for index, continuation in enumerate(request.continuations):
        kind = continuation.WhichOneof("content")
        if kind is None:
            raise InvalidParameterError(f"continuations[{index}]", "is empty; set text or tokens")
        found.append(continuation.text if kind == "text" else tuple(continuation.tokens.token_ids))
    return found


def parse_sampling(message: decoder_service_pb2.SamplingParams) -> SamplingSpec:
    """Returns sampling values as stated. Checks only the lengths of lists. Raises InvalidParameterError."""
    _check_number("sampling.logit_bias", message.logit_bias, MAX_LOGIT_BIAS_ENTRIES)
    _check_number("sampling.stop_token_ids", message.stop_token_ids, MAX_STOP_TOKEN_IDS)
    _check_number("sampling.stop", message.stop)
    # ListFields lists optional scalars that are set, also those set to zero.
    stated = {field.name: value for field, value in message.ListFields()}
    return SamplingSpec(
        temperature=stated.get("temperature"),
        top_p=stated.get("top_p"),
        top_k=stated.get("top_k"),
        min_p=stated.get("min_p"),
        repetition_penalty=stated.get("repetition_penalty"),
        presence_penalty=stated.get("presence_penalty"),
        frequency_penalty=stated.get("frequency_penalty"),
        logit_bias=dict(message.logit_bias),
        max_tokens=stated.get("max_tokens"),
        min_tokens=stated.get("min_tokens"),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        seed=stated.get("seed"),
        n=stated.get("n"),
        best_of=stated.get("best_of"),
        ignore_eos=message.ignore_eos,
        logprobs=stated.get("logprobs"),
        prompt_logprobs=stated.get("prompt_logprobs"),
        constraint=_constraint(message),
    )


def _constraint(message: decoder_service_pb2.SamplingParams) -> Constraint | None:
    name = message.WhichOneof("constraint")
    if name is None:
        return None
    kind = ConstraintKind(name)
    if kind is ConstraintKind.JSON_OBJECT:
        if not message.json_object:
            raise InvalidParameterError("sampling.json_object", "must be true, or unset")
        return Constraint(kind, "")
    if kind is ConstraintKind.CHOICE:
        texts = message.choice.texts
        if not 1 <= len(texts) <= _MAX_CHOICES or not all(texts):
            raise InvalidParameterError("sampling.choice", f"must have 1 to {_MAX_CHOICES} texts, none of them empty")
        return Constraint(kind, json.dumps(list(texts)))
    return Constraint(kind, getattr(message, name))


def parse_cache_scope(message: decoder_service_pb2.GenerateParams, tenant: Tenant) -> CacheScope:
    """Returns the scope in which the request shares KV blocks: requests of its tenant with the same cache salt."""
    if not _CACHE_SALT.fullmatch(message.cache_salt):
        raise InvalidParameterError("cache_salt", "must be at most 128 characters of [A-Za-z0-9._-]")
    name = tenant.name.encode()
    scope = len(name).to_bytes(8, "little") + name + message.cache_salt.encode()
    salt = hmac.new(tenant.secret, scope, hashlib.sha256).digest()
    return CacheScope(salt=salt, bypass=message.bypass_prefix_cache)


def _message(field: str, message: decoder_service_pb2.ChatMessage) -> ChatMessage:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidParameterError(f"{field}.role", "must be system, user, assistant or tool")
    return ChatMessage(
        role,
        tuple(_part(f"{field}.parts[{i}]", part) for i, part in enumerate(message.parts)),
        tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls),
        message.tool_call_id,
        message.reasoning,
    )


def _part(field: str, part: decoder_service_pb2.ContentPart) -> TextPart | ImagePart | VideoPart:
    kind = part.WhichOneof("part")
    if kind is None:
        raise InvalidParameterError(field, "is empty; set text, image or video")
    if kind == "text":
        return TextPart(part.text)
    if kind == "video":
        return VideoPart(_video(f"{field}.video", part.video))
    return ImagePart(_image(f"{field}.image", part.image))


def _check_number(field: str, elements: Sized, limit: int = _MAX_ELEMENTS) -> None:
    if len(elements) > limit:
        raise InvalidParameterError(field, f"must be at most {limit}, got {len(elements)}")


def _video(field: str, video: decoder_service_pb2.VideoSource) -> VideoSource:
    if len(video.frames) < _MIN_FRAMES:
        raise InvalidParameterError(
            f"{field}.frames", f"must be at least {_MIN_FRAMES}; send a single frame as an image"
        )
    fps = video.fps if video.HasField("fps") else DEFAULT_FPS
    if not MIN_FPS <= fps <= MAX_FPS:
        raise InvalidParameterError(f"{field}.fps", f"must be {MIN_FPS} … {MAX_FPS}, got {fps:g}")
    max_pixels = video.max_pixels if video.HasField("max_pixels") else None
    if max_pixels == 0:
        raise InvalidParameterError(f"{field}.max_pixels", "must be at least 1, got 0")
    size = (video.size.width, video.size.height) if video.HasField("size") else None
    if size is not None and not all(size):
        raise InvalidParameterError(f"{field}.size", f"must be at least 1 × 1, got {size[0]} × {size[1]}")
    frames = tuple(_frame(f"{field}.frames[{i}]", frame) for i, frame in enumerate(video.frames))
    return VideoSource(frames, fps, max_pixels, size)


def _frame(field: str, frame: common_pb2.ImageSource) -> VideoFrame:
    if frame.HasField("max_pixels"):
        raise InvalidParameterError(f"{field}.max_pixels", "is set for the whole video; leave it unset")
    source = _image(field, frame)
    if isinstance(source, CachedImage):
        return VideoFrame(None, source.digest, source.fingerprint)
    assert isinstance(source.data, bytes), "images of a message are bytes"
    return VideoFrame(source.data, source.expected_digest)


def _images(field: str, images: Sequence[common_pb2.ImageSource]) -> tuple[ImageSource, ...]:
    _check_number(field, images)
    return tuple(_image(f"{field}[{i}]", image) for i, image in enumerate(images))


def _image(field: str, image: common_pb2.ImageSource) -> ImageSource:
    if image.beside_others:
        raise InvalidParameterError(f"{field}.beside_others", "is for Encode only; leave it unset")
    for name in ("frame_size", "second_frame"):
        if image.HasField(name):
            raise InvalidParameterError(f"{field}.{name}", "is for Encode only; send the frames as a video")
    options = ProcessorOptions(image.max_pixels if image.HasField("max_pixels") else None)
    if options.max_pixels == 0:
        raise InvalidParameterError(f"{field}.max_pixels", "must be at least 1, got 0")
    kind = image.WhichOneof("source")
    if kind is None:
        raise InvalidParameterError(field, "is empty; set data or key")
    if kind == "key":
        return _cached_image(f"{field}.key", image.key, options)
    has_digest = image.HasField("expected_digest")
    digest = parse_digest(image.expected_digest, f"{field}.expected_digest") if has_digest else None
    return InlineImage(image.data, options, digest)


def _cached_image(field: str, key: common_pb2.ContentKey, options: ProcessorOptions) -> CachedImage:
    if key.algorithm not in _SHA256:
        raise InvalidParameterError(f"{field}.algorithm", "this server takes SHA-256 digests only")
    return CachedImage(parse_digest(key.digest, f"{field}.digest"), options, key.encoder_fingerprint or None)
