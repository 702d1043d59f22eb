"""`lookonce generate`: asks one question and prints the answer."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from lookonce.client import Client
from lookonce.commands.asking.answers import json_answer, print_answers, stream_text
from lookonce.commands.asking.questions import chat_prompt, left_s, question_of, raw_prompt
from lookonce.commands.asking.sampling import takes_sampling
from lookonce.commands.options import AsJson, ImageNames, MaxPixels, System, Target, Timeout, filled
from lookonce.commands.output import print_json
from lookonce.commands.pictures import existing_folder, named_image, video_of
from lookonce.commands.targets import connect, decoder_target
from lookonce.generation import GenerateOptions, Prompt
from lookonce.images import ImageRef
from lookonce.sdk.connection.channel import Deadline
from lookonce.videos import Video


@takes_sampling
def generate(
    prompt: Annotated[str, typer.Argument(help="The question; - reads it from standard input.")],
    *,
    image: ImageNames = None,
    video: Annotated[
        list[pathlib.Path] | None,
        typer.Option(
            "--video",
            help="Folder with the frames of a video as image files, in the order of their names; repeatable. Videos "
            "come after the images.",
            metavar="FOLDER",
            parser=existing_folder,
        ),
    ] = None,
    fps: Annotated[float | None, typer.Option(min=0.001, max=1000.0, help="Frames per second of the videos.")] = None,
    frame_size: Annotated[
        tuple[int, int] | None,
        typer.Option(
            metavar="WIDTH HEIGHT", help="Size of the frames in pixels. With it, cached frames are not sent again."
        ),
    ] = None,
    max_pixels: MaxPixels = None,
    system: System = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Send the prompt without the chat template, for models that have none. Write the model's image "
            "placeholder once for each image; without any, the images come before the text.",
        ),
    ] = False,
    number: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--answers",
            min=1,
            max=128,
            help="Number of answers, with seeds that count up. They are not streamed. Each line begins with a number; "
            "with --json, all but the first are in `others`.",
        ),
    ] = None,
    best_of: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=128,
            help="Generate so many answers and show the likeliest ones, as many as -n says. Not streamed.",
        ),
    ] = None,
    as_json: AsJson = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0, help="With --json: report each token's log probability, and those of so many likeliest tokens."
        ),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(min=0, help="With --json: the same for each token of the prompt but the first.")
    ] = None,
    request_id: Annotated[
        str | None, typer.Option(help="Id of the request in the logs of the services.", callback=filled)
    ] = None,
    target: Target = None,
    timeout_s: Timeout = 120.0,
    sampling: GenerateOptions,
) -> None:
    """Ask about images. The answer is streamed to stdout."""
    for hint, asked_for in (("--logprobs", logprobs), ("--prompt-logprobs", prompt_logprobs)):
        if asked_for is not None and not as_json:
            raise typer.BadParameter("needs --json, which shows them", param_hint=hint)
    if raw and (video or system is not None):
        raise typer.BadParameter("sends no chat, so it takes neither --video nor --system", param_hint="--raw")
    text = question_of(prompt)
    deadline, started_s = Deadline.after(timeout_s), time.monotonic()
    images = [named_image(name, max_pixels) for name in image or []]
    videos = [video_of(folder, fps, max_pixels, frame_size) for folder in video or []]
    with connect(decoder_target(target)) as client:
        asked = _prompt(client, raw, system, images, videos, text, deadline)
        options: GenerateOptions = {**sampling, "logprobs": logprobs, "request_id": request_id}
        options |= {"prompt_logprobs": prompt_logprobs, "timeout_s": left_s(deadline)}
        if not as_json and number in (None, 1) and best_of is None:
            with client.stream(asked, **options) as stream:
                stream_text(stream)
            return
        options |= {"n": number, "best_of": best_of}
        answer = client.generate(asked, **options)
    if as_json:
        num_frames = sum(len(one.frames) for one in videos)
        print_json(json_answer(answer, len(images), num_frames, time.monotonic() - started_s))
    else:
        print_answers(answer)


def _prompt(
    client: Client,
    is_raw: bool,
    system: str | None,
    images: Sequence[ImageRef],
    videos: Sequence[Video],
    text: str,
    deadline: Deadline,
) -> Prompt:
    if is_raw:
        return raw_prompt(client, text, images, left_s(deadline))
    return chat_prompt(system, images, videos, text)
