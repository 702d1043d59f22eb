"""Does anything block the services' event loops? `--help` lists the options.

A decoder and an encoder record the duration of every event loop callback. They answer streams of text and questions
about pictures, some of them photos of twelve megapixels, all at once. A callback that takes more than a millisecond of
CPU time delays all other calls by that time. Its wall time is longer where threads share the processors, so only CPU
time counts.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import pathlib
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import PIL.Image

from benchmarks import report
from benchmarks.frozen_redis import quantile
from benchmarks.models import demo_model, small_llava
from benchmarks.workloads import ask_about, picture
from lookonce.aio import AsyncClient
from lookonce.local.child_process import ChildProcess
from lookonce.local.local_stack import LocalStack

_NAME = "event_loop"
_TIMEOUT_S = 600.0
_PHOTO_SIZE = (4000, 3000)
_WRITE_TIMEOUT_S = 30.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that are sent at once."""

    num_streams: int = 64
    num_pictures: int = 24
    num_photos: int = 4
    # Tokens that each request generates.
    num_tokens: int = 48


@dataclass(frozen=True, slots=True)
class Loop:
    """The callback durations of one process's event loop."""

    service: str
    num_callbacks: int
    # CPU and wall seconds of the callbacks at each quantile.
    cpu_s: dict[float, float]
    wall_s: dict[float, float]
    # CPU seconds of each callback over a millisecond, by the name of its function.
    long_s: dict[str, list[float]]


class WatchedStack(LocalStack):
    """A stack whose event loops record the duration of their callbacks."""

    def watch(self) -> None:
        """Starts a new recording in all processes."""
        for process in (*self.encoders, *self.decoders):
            os.kill(process.pid, signal.SIGUSR1)

    def loops(self) -> list[Loop]:
        """Returns the recording since `watch`."""
        return [_loop(process, self._notes(process.name)) for process in (*self.encoders, *self.decoders)]

    def _launched(self, name: str, module: str, arguments: Sequence[str]) -> ChildProcess:
        return super()._launched(name, "benchmarks.watched_loop", [module, str(self._notes(name)), *arguments])

    def _notes(self, name: str) -> pathlib.Path:
        return self._directory / f"{name}.notes"


def main(given: Sequence[str] | None = None) -> None:
    """Measures, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--streams", type=int, default=64, help="texts at once (default: %(default)s)")
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    load = Load(num_streams=arguments.streams)
    if arguments.quick:
        load = Load(4, 2, 1, 4)
    loops = measure(demo_model() if arguments.quick else small_llava(), load)
    figures = {"load": asdict(load), "loops": [asdict(loop) for loop in loops]}
    report.publish(_NAME, figures, section(load, loops), is_quick=arguments.quick)


def measure(model: pathlib.Path, load: Load) -> list[Loop]:
    """Sends the load once, after one unrecorded request of each kind."""
    with WatchedStack(model) as stack:
        asyncio.run(_ask(stack.decoder_targets[0], Load(1, 1, 1, 4), random.Random("before")))
        stack.watch()
        asyncio.run(_ask(stack.decoder_targets[0], load, random.Random(_NAME)))
        return stack.loops()


async def _ask(target: str, load: Load, rng: random.Random) -> None:
    texts = [ask_about(rng).question for _ in range(load.num_streams)]
    asks = [ask_about(rng, picture(rng)) for _ in range(load.num_pictures)]
    asks += [ask_about(rng, _photo(rng)) for _ in range(load.num_photos)]
    async with AsyncClient.connect(target, timeout_s=_TIMEOUT_S) as client:

        async def read(text: str) -> None:
            async with client.stream(text, max_tokens=load.num_tokens, temperature=0.0, ignore_eos=True) as pieces:
                async for _ in pieces:
                    pass

        answers = [client.generate(ask.question, ask.pictures, max_tokens=load.num_tokens) for ask in asks]
        await asyncio.gather(*map(read, texts), *answers)


def _photo(rng: random.Random) -> bytes:
    """Returns a JPEG of a few megabytes."""
    grain = PIL.Image.frombytes("RGB", (1000, 750), rng.randbytes(3 * 1000 * 750))
    file = io.BytesIO()
    grain.resize(_PHOTO_SIZE, PIL.Image.Resampling.BILINEAR).save(file, "JPEG", quality=90)
    return file.getvalue()


def _loop(process: ChildProcess, path: pathlib.Path) -> Loop:
    os.kill(process.pid, signal.SIGUSR2)
    deadline_s = time.monotonic() + _WRITE_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{process.name} has not written its notes:\n{process.log_tail()}")
        time.sleep(_POLL_S)
    record = json.loads(path.read_text())
    cpu_s, wall_s = ([ns / 1e9 for ns in record[kind]] for kind in ("cpu_ns", "wall_ns"))
    return Loop(
        process.name,
        len(cpu_s),
        _quantiles(cpu_s),
        _quantiles(wall_s),
        {name: [ns / 1e9 for ns in values] for name, values in record["long_ns"].items()},
    )


def _quantiles(seconds: Sequence[float]) -> dict[float, float]:
    return {share: quantile(seconds, share) for share in (0.5, 0.99, 0.999, 1.0)}


def section(load: Load, loops: Sequence[Loop]) -> str:
    """Returns the Markdown of this section of RESULTS.md."""
    question = (
        f"## event_loop\n\nDoes anything hold up the services' event loops? Asked at once: {load.num_streams} texts "
        f"token by token, {load.num_pictures} pictures and {load.num_photos} photos of 12\nmegapixels. "
        "Goal: no callback over 1 ms of CPU."
    )
    head = ["process", "callbacks", "median", "99 %", "99.9 %", "longest", "over 1 ms", "of these, by what ran"]
    rows = [
        [
            loop.service,
            f"{loop.num_callbacks:,}",
            *(f"{1000 * seconds:.3f} ms" for seconds in loop.cpu_s.values()),
            str(sum(map(len, loop.long_s.values()))),
            ", ".join(
                f"{name}: {len(values)}, up to {1000 * max(values):.1f} ms" for name, values in _longest(loop.long_s)
            ),
        ]
        for loop in loops
    ]
    return "\n\n".join([question, "CPU time of callbacks:", report.table(head, rows)])


def _longest(long_s: dict[str, list[float]]) -> list[tuple[str, list[float]]]:
    return sorted(long_s.items(), key=lambda item: -max(item[1]))


if __name__ == "__main__":
    main()
