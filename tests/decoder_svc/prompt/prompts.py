"""Prompts and resolved images for tests."""

from __future__ import annotations

from decoder_svc.prompt.prompt_builder import PromptBuilder, PromptLimits, ResolvedImage
from decoder_svc.prompt.prompt_spec import ChatMessage, ChatPrompt, ChatRole, ImagePart, InlineImage, TextPart
from decoder_svc.service import LoadedText
from lookonce.content_key import DEFAULT_TENANT, EncoderFingerprint, ProcessorOptions, content_key, image_digest

NO_OPTIONS = ProcessorOptions()
FINGERPRINT = EncoderFingerprint("f" * 64)


def builder(text: LoadedText, max_context_tokens: int = 512, max_images: int = 4) -> PromptBuilder:
    """Builds prompts for a tiny model."""
    limits = PromptLimits(max_context_tokens, max_images, text.vocab_size)
    return PromptBuilder(text.tokenizer, text.template, text.family, limits)


def resolved(
    data: bytes = b"", size: tuple[int, int] = (80, 60), options: ProcessorOptions = NO_OPTIONS
) -> ResolvedImage:
    """An image as the resolver would give it."""
    key = content_key(image_digest(data), FINGERPRINT, options, DEFAULT_TENANT)
    return ResolvedImage(key, *size, options, data)


def inline(data: bytes = b"", options: ProcessorOptions = NO_OPTIONS) -> InlineImage:
    """An image that came with the request."""
    return InlineImage(data, options)


def chat(*parts: str | InlineImage) -> ChatPrompt:
    """Returns a conversation of one user message."""
    return ChatPrompt((ChatMessage(ChatRole.USER, tuple(_part(part) for part in parts)),))


def _part(part: str | InlineImage) -> TextPart | ImagePart:
    return TextPart(part) if isinstance(part, str) else ImagePart(part)
