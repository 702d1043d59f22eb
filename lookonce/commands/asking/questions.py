"""Builds prompts from the arguments of `generate` and `chat`. Calls the server only for an image placeholder."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import typer

from lookonce.client import Client
from lookonce.commands.options import utf8
from lookonce.generation import Message, Prompt, TextPrompt
from lookonce.images import ImageRef
from lookonce.sdk.connection.channel import Deadline
from lookonce.videos import Video


def question_of(text: str) -> str:
    """Returns the question; `-` stands for standard input. Raises BadParameter if that is empty or no text."""
    if text != "-":
        return utf8(text) or ""
    try:
        read = sys.stdin.read().strip()
    except UnicodeDecodeError:
        raise typer.BadParameter("standard input is no text in UTF-8", param_hint="PROMPT") from None
    if not read:
        raise typer.BadParameter("standard input is empty", param_hint="PROMPT")
    return read


def chat_prompt(system: str | None, images: Sequence[ImageRef], videos: Sequence[Video], text: str) -> list[Message]:
    """Returns a chat with one user turn: images, videos, then the text."""
    turns = [Message("system", system)] if system is not None else []
    return [*turns, Message("user", [*images, *videos, text])]


def raw_prompt(client: Client, text: str, images: Sequence[ImageRef], timeout_s: float) -> Prompt:
    """Returns a prompt without a chat template. A text without placeholders gets one for each image at its start."""
    placeholder = client.model_info(timeout_s=timeout_s).image_placeholder if images else ""
    return TextPrompt(text if placeholder in text else placeholder * len(images) + text, images)


def left_s(deadline: Deadline) -> float:
    """Returns the rest of a deadline, seconds; math.inf without one. Raises DeadlineError if it has passed."""
    rest_s = deadline.remaining_s()
    return math.inf if rest_s is None else rest_s
