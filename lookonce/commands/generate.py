"""`lookonce generate`: asks one question and prints the answer."""

from __future__ import annotations

import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from lookonce.client import Client
from lookonce.commands.options import MAX_UINT32, MAX_UINT64, Target, Timeout
from lookonce.commands.output import err
from lookonce.commands.targets import connect, decoder_target
from lookonce.commands.usage_line import usage_line
from lookonce.generation import GenerateOptions, TextPrompt
from lookonce.sdk.connection.channel import Deadline


def generate(
    prompt: Annotated[str, typer.Argument(help="The question.")],
    image: Annotated[
        list[pathlib.Path] | None,
        typer.Option("--image", "-i", help="Image file; repeatable.", exists=True, dir_okay=False),
    ] = None,
    target: Target = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, max=MAX_UINT32, help="Longest answer, tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy. Default: the model's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=MAX_UINT64, help="Makes sampling repeatable.")] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Send the prompt without the chat template, for models that have none. Write the model's image "
            "placeholder once for each image; without any, the images come before the text.",
        ),
    ] = False,
    timeout_s: Timeout = 120.0,
) -> None:
    """Ask about images. The answer is streamed to stdout."""
    deadline = Deadline.after(timeout_s)
    options: GenerateOptions = {}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if temperature is not None:
        options["temperature"] = temperature
    if seed is not None:
        options["seed"] = seed
    images = image or []
    with connect(decoder_target(target)) as client:
        asked = _raw(client, prompt, images, _left_s(deadline)) if raw else prompt
        options["timeout_s"] = _left_s(deadline)
        with client.stream(asked, () if raw else images, **options) as stream:
            for text in stream:
                sys.stdout.write(text)
                sys.stdout.flush()
            sys.stdout.write("\n")
            err.print(f"[dim]{usage_line(stream.usage)}[/]")


def _left_s(deadline: Deadline) -> float:
    """Returns the rest of a deadline, seconds; math.inf without one. Raises DeadlineError if it has passed."""
    left_s = deadline.remaining_s()
    return math.inf if left_s is None else left_s


def _raw(client: Client, text: str, images: Sequence[pathlib.Path], timeout_s: float) -> TextPrompt:
    """Returns a prompt without a chat template. A text without placeholders gets one for each image at its start."""
    placeholder = client.model_info(timeout_s=timeout_s).image_placeholder if images else ""
    return TextPrompt(text if placeholder in text else placeholder * len(images) + text, images)
