"""Messages become plain types, and each field that is wrong is named."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from decoder_svc import wire_request
from decoder_svc.prompt.prompt_spec import (
    CachedImage,
    ChatPrompt,
    ImagePart,
    InlineImage,
    TextPart,
    TextPrompt,
    TokenPrompt,
    VideoPart,
)
from decoder_svc.scheduling.sampling_params import Constraint, ConstraintKind
from lookonce.common.v1 import common_pb2
from lookonce.content_key import Tenant
from lookonce.decoder.v1 import decoder_service_pb2 as pb
from lookonce.errors import ContextTooLongError, InvalidInputError, InvalidParameterError
from lookonce.families.video import DEFAULT_FPS

DIGEST = hashlib.sha256(b"image").digest()
MAX_CONTEXT_TOKENS = 8
KEY = common_pb2.ContentKey(digest=DIGEST)
BY_KEY = common_pb2.ImageSource(key=KEY)
INLINE = common_pb2.ImageSource(data=b"image")
ACME, OTHER = (Tenant(name, b"a secret of 32 bytes for tests..") for name in ("acme", "other"))


def chat(*parts: pb.ContentPart, role: pb.Role.ValueType = pb.ROLE_USER) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=role, parts=parts)])


def image(**fields: Any) -> pb.ContentPart:
    return pb.ContentPart(image=common_pb2.ImageSource(**fields))


def video(*frames: common_pb2.ImageSource, **fields: Any) -> pb.ContentPart:
    return pb.ContentPart(video=pb.VideoSource(frames=frames, **fields))


# Prompts.


def test_a_chat_keeps_its_messages_and_their_parts_in_order() -> None:
    message = chat(
        pb.ContentPart(text="what is in"),
        image(data=b"image", max_pixels=100, expected_digest=DIGEST),
        image(key=common_pb2.ContentKey(digest=DIGEST, encoder_fingerprint="f")),
        video(INLINE, BY_KEY),
    )
    message.messages.append(pb.ChatMessage(role=pb.ROLE_ASSISTANT, parts=[pb.ContentPart(text="a zebra")]))
    parsed = wire_request.parse_prompt(pb.GenerateParams(chat=message), MAX_CONTEXT_TOKENS)
    assert isinstance(parsed, ChatPrompt)
    assert [message.role.value for message in parsed.messages] == ["user", "assistant"]
    text, inline, cached, frames = parsed.messages[0].parts
    assert text == TextPart("what is in")
    assert isinstance(inline, ImagePart)
    assert isinstance(inline.source, InlineImage)
    assert (inline.source.data, inline.source.options.max_pixels, inline.source.expected_digest) == (
        b"image",
        100,
        DIGEST,
    )
    assert isinstance(cached, ImagePart)
    assert isinstance(cached.source, CachedImage)
    assert (cached.source.digest, cached.source.fingerprint) == (DIGEST, "f")
    assert isinstance(frames, VideoPart)
    assert (frames.source.fps, frames.source.max_pixels, frames.source.size) == (DEFAULT_FPS, None, None)
    assert [(frame.data, frame.digest) for frame in frames.source.frames] == [(b"image", None), (None, DIGEST)]


def test_text_and_token_prompts_have_their_images_beside_them() -> None:
    text = pb.GenerateParams(text=pb.TextPrompt(text="<image> what", images=[INLINE]))
    parsed = wire_request.parse_prompt(text, MAX_CONTEXT_TOKENS)
    assert isinstance(parsed, TextPrompt)
    assert (parsed.text, len(parsed.images)) == ("<image> what", 1)
    tokens = pb.GenerateParams(tokens=pb.TokenPrompt(token_ids=range(MAX_CONTEXT_TOKENS), images=[BY_KEY]))
    parsed = wire_request.parse_prompt(tokens, MAX_CONTEXT_TOKENS)
    assert isinstance(parsed, TokenPrompt)
    assert (parsed.token_ids, len(parsed.images)) == (tuple(range(MAX_CONTEXT_TOKENS)), 1)


def test_more_token_ids_than_the_context_are_refused_with_value_and_limit() -> None:
    message = pb.GenerateParams(tokens=pb.TokenPrompt(token_ids=range(MAX_CONTEXT_TOKENS + 1)))
    with pytest.raises(ContextTooLongError, match="the prompt has 9 tokens, the context 8"):
        wire_request.parse_prompt(message, MAX_CONTEXT_TOKENS)


PART = "chat.messages[0].parts[0]"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateParams(), "prompt"),
        (pb.GenerateParams(chat=chat(role=pb.ROLE_UNSPECIFIED)), "chat.messages[0].role"),
        (pb.GenerateParams(chat=chat(pb.ContentPart())), PART),
        (pb.GenerateParams(chat=chat(image())), f"{PART}.image"),
        (pb.GenerateParams(chat=chat(image(data=b"x", max_pixels=0))), f"{PART}.image.max_pixels"),
        (pb.GenerateParams(chat=chat(image(data=b"x", expected_digest=b"short"))), f"{PART}.image.expected_digest"),
        (pb.GenerateParams(chat=chat(image(key=common_pb2.ContentKey(digest=b"")))), f"{PART}.image.key.digest"),
        (pb.GenerateParams(chat=chat(image(data=b"x", beside_others=True))), f"{PART}.image.beside_others"),
        (pb.GenerateParams(chat=chat(image(data=b"x", second_frame=b"y"))), f"{PART}.image.second_frame"),
        (pb.GenerateParams(chat=chat(video(INLINE))), f"{PART}.video.frames"),
        (pb.GenerateParams(chat=chat(video(INLINE, INLINE, fps=0))), f"{PART}.video.fps"),
        (pb.GenerateParams(chat=chat(video(INLINE, INLINE, fps=float("nan")))), f"{PART}.video.fps"),
        (pb.GenerateParams(chat=chat(video(INLINE, INLINE, max_pixels=0))), f"{PART}.video.max_pixels"),
        (
            pb.GenerateParams(chat=chat(video(INLINE, common_pb2.ImageSource(data=b"x", max_pixels=5)))),
            f"{PART}.video.frames[1].max_pixels",
        ),
        (pb.GenerateParams(text=pb.TextPrompt(images=[INLINE, common_pb2.ImageSource()])), "text.images[1]"),
    ],
)
def test_a_field_that_is_wrong_is_named(message: pb.GenerateParams, field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        wire_request.parse_prompt(message, MAX_CONTEXT_TOKENS)
    assert caught.value.metadata["field"] == field


def test_messages_parts_and_frames_are_counted_together() -> None:
    full = chat(*[pb.ContentPart(text="a")] * 4095)
    assert len(wire_request.parse_chat(full).messages[0].parts) == 4095
    for more in (
        chat(*[pb.ContentPart(text="a")] * 4096),
        chat(*[pb.ContentPart(text="a")] * 4000, video(*[INLINE] * 95)),
        pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.ROLE_USER)] * 4097),
    ):
        with pytest.raises(InvalidParameterError, match=r"chat\.messages: must have at most 4096"):
            wire_request.parse_chat(more)


# Sampling.


def test_values_that_are_not_set_are_none_and_zero_is_set() -> None:
    assert wire_request.parse_sampling(pb.SamplingParams()).temperature is None
    spec = wire_request.parse_sampling(pb.SamplingParams(temperature=0.0, top_k=0, seed=0, stop=["."], regex="a*"))
    assert (spec.temperature, spec.top_k, spec.seed) == (0.0, 0, 0)
    assert (spec.stop, spec.constraint) == ((".",), Constraint(ConstraintKind.REGEX, "a*"))
    assert spec.max_tokens is None


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.SamplingParams(stop=["a"] * 4097), "sampling.stop"),
        (pb.SamplingParams(stop_token_ids=range(100_000)), "sampling.stop_token_ids"),
        (pb.SamplingParams(logit_bias=dict.fromkeys(range(100_000), 1.0)), "sampling.logit_bias"),
    ],
)
def test_lists_that_are_too_long_are_refused_before_they_are_copied(message: pb.SamplingParams, field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        wire_request.parse_sampling(message)
    assert caught.value.field == field


# Cache scopes.


def test_blocks_are_shared_by_requests_of_one_tenant_with_the_same_salt() -> None:
    def salt(tenant: Tenant, text: str) -> bytes:
        return wire_request.parse_cache_scope(pb.GenerateParams(cache_salt=text), tenant).salt

    assert salt(ACME, "a") == salt(ACME, "a")
    salts = [salt(ACME, ""), salt(ACME, "a"), salt(OTHER, ""), salt(OTHER, "a"), salt(Tenant("", ACME.secret), "acme")]
    assert len(set(salts)) == len(salts)


@pytest.mark.parametrize("salt", ["a b", "é", "x" * 129])
def test_a_malformed_salt_is_refused(salt: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        wire_request.parse_cache_scope(pb.GenerateParams(cache_salt=salt), ACME)
    assert caught.value.field == "cache_salt"


def test_a_request_may_bypass_the_prefix_cache() -> None:
    scope = wire_request.parse_cache_scope(pb.GenerateParams(bypass_prefix_cache=True), ACME)
    assert scope.bypass
    assert not wire_request.parse_cache_scope(pb.GenerateParams(), ACME).bypass
