"""The images and videos of a prompt in reading order, and the bytes that came with it."""

from __future__ import annotations

from decoder_svc.prompt.prompt_spec import (
    CachedImage,
    ChatMessage,
    ChatPrompt,
    ChatRole,
    ImagePart,
    InlineImage,
    TextPart,
    TextPrompt,
    TokenPrompt,
    VideoFrame,
    VideoPart,
    VideoSource,
    num_inline_bytes,
)
from lookonce.content_key import ProcessorOptions, image_digest
from lookonce.image_file import FramePair

OPTIONS = ProcessorOptions()
DIGEST = image_digest(b"known")
FIRST, SECOND = InlineImage(b"12345", OPTIONS), CachedImage(DIGEST, OPTIONS)
VIDEO = VideoSource((VideoFrame(b"123"), VideoFrame(None, DIGEST)), fps=2.0)


def test_visuals_of_a_chat_are_in_reading_order_over_all_messages() -> None:
    prompt = ChatPrompt(
        (
            ChatMessage(ChatRole.SYSTEM, (TextPart("be brief"),)),
            ChatMessage(ChatRole.USER, (ImagePart(FIRST), TextPart("and"), VideoPart(VIDEO))),
            ChatMessage(ChatRole.USER, (ImagePart(SECOND),)),
        )
    )
    assert prompt.visuals == (FIRST, VIDEO, SECOND)
    assert prompt.images == (FIRST, SECOND)
    assert prompt.videos == (VIDEO,)


def test_only_files_that_came_with_the_prompt_count_as_bytes() -> None:
    pair = InlineImage(FramePair(b"12", b"3456"), OPTIONS)
    user = ChatMessage(ChatRole.USER, (ImagePart(FIRST), VideoPart(VIDEO), ImagePart(SECOND), TextPart("text")))
    assert num_inline_bytes(ChatPrompt((user,))) == 5 + 3
    assert num_inline_bytes(TextPrompt("text", (FIRST, SECOND))) == 5
    assert num_inline_bytes(TokenPrompt((1, 2), (pair, FIRST))) == 6 + 5
