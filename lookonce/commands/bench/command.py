"""`lookonce bench`: measures a running decoder under a load that its user shapes."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import random
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich.progress import Progress

from lookonce.aio import AsyncClient
from lookonce.commands.asking.sampling import takes_sampling
from lookonce.commands.bench.load import Load, Measured
from lookonce.commands.bench.plot import svg
from lookonce.commands.bench.report import as_object, lines, report_of
from lookonce.commands.bench.workload import Question, WorkloadOptions, arrival_times, questions
from lookonce.commands.options import Target, Timeout, utf8
from lookonce.commands.output import complain, err, harmless, print_rows, say
from lookonce.commands.pictures import existing_path, files_below, is_image
from lookonce.commands.targets import decoder_target
from lookonce.generation import GenerateOptions
from lookonce.local.cli_settings import CliSettings

_PROMPT = "What is in the picture?"
_MAX_TOKENS = 16


def _writable(text: str) -> pathlib.Path:
    """Refuses a file that cannot be written, before a run whose figures it would get."""
    path = pathlib.Path(text)
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {harmless(path.parent)}")
    if not text or path.is_dir():
        raise typer.BadParameter(f"{harmless(text) or repr(text)} is a folder or empty; name a file")
    if text != "-" and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{harmless(text)} cannot be written")
    return path


@takes_sampling
def bench(
    prompt: Annotated[str, typer.Argument(help="The question of all requests.")] = _PROMPT,
    *,
    requests: Annotated[int, typer.Option(min=1, help="Number of measured requests.")] = 100,
    callers: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Closed loop: callers that ask at the same time. Default: 4.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Open loop instead: requests per second, at random times, whatever is running."),
    ] = None,
    reuse: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of pictures that the run has shown before.")
    ] = 0.5,
    pictures: Annotated[
        list[pathlib.Path] | None,
        typer.Option(
            help="Image file or folder with some; repeatable. Default: drawn pictures.",
            metavar="FILE|FOLDER",
            parser=existing_path,
        ),
    ] = None,
    pictures_per_request: Annotated[int, typer.Option(min=0, help="Pictures that each request shows.")] = 1,
    size: Annotated[int, typer.Option(min=8, max=8192, help="Width and height of drawn pictures, pixels.")] = 448,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before the measured ones.")] = 1,
    workload_seed: Annotated[
        int | None, typer.Option(help="Repeats pictures and times of an earlier run. Default: new ones.")
    ] = None,
    json_file: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--json", help="File for all figures and each request; - is stdout.", metavar="FILE", parser=_writable
        ),
    ] = None,
    plot: Annotated[
        pathlib.Path | None,
        typer.Option(help="SVG file for a plot of the latencies.", metavar="FILE", parser=_writable),
    ] = None,
    target: Target = None,
    timeout_s: Timeout = 120.0,
    sampling: GenerateOptions,
) -> None:
    """Ask many questions about pictures and report times, rates and the source of the image rows.

    Nothing is repeated: a refusal counts as a failure. Greedy answers of 16 tokens unless sampling options say
    otherwise. Exit status 1 says that a request failed, or that a file could not be written.
    """
    if callers is not None and rate is not None:
        raise typer.BadParameter("give --callers for a closed loop, or --rate for an open one")
    utf8(prompt)
    seed = secrets.randbits(32) if workload_seed is None else workload_seed
    numbers = random.Random(seed)
    shape = WorkloadOptions(requests + warm_up, pictures_per_request, reuse, size)
    asked = questions(shape, _files(pictures or []), numbers)
    times_s = None if rate is None else arrival_times(requests, rate, numbers)
    options: GenerateOptions = {"max_tokens": _MAX_TOKENS, "temperature": 0.0, **sampling, "timeout_s": timeout_s}
    measured = _measured(decoder_target(target), prompt, options, asked, warm_up, times_s, callers or 4)
    report = report_of(measured)
    title = f"{callers or 4} callers" if rate is None else f"{rate:g} requests per second"
    described = {
        "prompt": prompt, "callers": None if rate else callers or 4, "rate_per_s": rate, "reuse": reuse,
        "pictures_per_request": pictures_per_request, "workload_seed": seed,
        **{name: value for name, value in options.items() if name != "timeout_s"},
    }  # fmt: skip
    everything = json.dumps(as_object(report, described, measured)) + "\n"
    drawn = None if plot is None else svg(measured, f"{title}, {reuse:.0%} of pictures seen before")
    if str(json_file) == "-":
        sys.stdout.write(everything)
        json_file = None
    else:
        print_rows(("figure", "value"), [("load", title), ("workload seed", str(seed)), *lines(report)])
    for error, number in report.errors.items():
        say(f"{number} failed: {error}")
    # Files come last: one that cannot be written takes no figures along.
    are_written = [_is_written(json_file, everything), _is_written(plot, drawn)]
    if report.num_failed or not all(are_written):
        raise typer.Exit(1)


def _measured(
    target: str,
    prompt: str,
    options: GenerateOptions,
    asked: Sequence[Question],
    num_warm_up: int,
    times_s: Sequence[float] | None,
    num_callers: int,
) -> list[Measured]:
    """Runs the load; shows its progress on a terminal."""
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("asking", total=len(asked) - num_warm_up)
        run = _run(target, prompt, options, asked, num_warm_up, times_s, num_callers, lambda: progress.advance(task))
        return asyncio.run(run)


async def _run(
    target: str,
    prompt: str,
    options: GenerateOptions,
    asked: Sequence[Question],
    num_warm_up: int,
    times_s: Sequence[float] | None,
    num_callers: int,
    done: Callable[[], None],
) -> list[Measured]:
    async with AsyncClient.connect(target, max_retries=0, **CliSettings().connection()) as client:
        load = Load(client, prompt, options, done)
        await load.warm_up(asked[:num_warm_up])
        if times_s is not None:
            return await load.open_loop(asked[num_warm_up:], times_s)
        return await load.closed_loop(asked[num_warm_up:], num_callers)


def _files(paths: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """Returns the image files among some paths. Raises BadParameter if paths are given and there is none."""
    named = [file for path in paths for file in (files_below(path) if path.is_dir() else [path])]
    images = [file for file in named if is_image(file)]
    if paths and not images:
        raise typer.BadParameter("there is no image file", param_hint="--pictures")
    return images


def _is_written(path: pathlib.Path | None, text: str | None) -> bool:
    """Writes a file, if there is one to write. Says why if that fails."""
    if path is None or text is None:
        return True
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        complain(f"{path}: {error.strerror or error}")
        return False
    return True
