"""How many images per second does the encoder compute, against vLLM and transformers? `--help` lists the options.

All sides take turns on the same CPUs. They get the same pixels and compute the same rows with the same element type;
the section states the distance between their rows. The peer's tower and projector run in its own interpreter, inside
its engine. A second measurement compares our whole pipeline (decoding, preprocessing, forward, Redis) with the forward
pass alone.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

import numpy as np
import PIL.Image
import torch
from prometheus_client import CollectorRegistry

from benchmarks import models, peer, report
from benchmarks.forced_level import peer_variables
from encoder_svc.cache.encode_job import CachePolicy, ImageInput
from encoder_svc.images.image_inputs import PixelInputs
from encoder_svc.service import open_pipeline
from encoder_svc.settings import EncoderSettings
from encoder_svc.vision.vision_model import VisionModel
from lookonce.content_key import DEFAULT_TENANT, ProcessorOptions
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.model.half_model import load_vision_half

_NAME = "encode_speed"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_OURS, _TRANSFORMERS, _PEER = "lookonce", "transformers", "vllm"
_WORKER = pathlib.Path(__file__).with_name("peer_encoder_worker.py")
_SIZE = (640, 480)
_SEED = 20261122
# OpenMP threads of the previous side may spin this long.
_PAUSE_S = 0.3
_REDIS_BYTES = 256 << 20
_STOP_TIMEOUT_S = 30.0
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Keeps the model in the process that we control.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One element type and one number of images per pass."""

    dtype: str
    batch: int
    # Images in a round, and the seconds of each round by side.
    num_images: int
    seconds: dict[str, list[float]]

    def ratios(self, side: str) -> list[float]:
        """Returns our images per second over those of `side`, one ratio per round."""
        return [theirs / ours for theirs, ours in zip(self.seconds[side], self.seconds[_OURS], strict=True)]


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one element type."""

    cells: tuple[Cell, ...]
    # Distance of each other side's rows from ours, relative to the size of ours.
    row_distance: dict[str, float]
    # By round: seconds of the forward alone, and of as many image files through the whole pipeline at once.
    through_pipeline_s: tuple[tuple[float, float], ...]


class Side(Protocol):
    """An encoder under test, which encodes the benchmark's pixels."""

    def encode(self, batch: int) -> float:
        """Encodes all images in passes of `num_together`; returns seconds."""

    def rows(self) -> torch.Tensor:
        """Rows of all images, float32 [num_images, num_rows, hidden_size]."""


def main(given: Sequence[str] | None = None) -> None:
    """Measures both element types, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="per cell and side (default: %(default)s)")
    parser.add_argument("--images", type=int, default=2, help="of a round (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2], help="images in a pass")
    parser.add_argument("--dtypes", nargs="+", default=list(_DTYPES), choices=list(_DTYPES))
    report.add_quick(parser)
    peer.add_arguments(parser)
    arguments = parser.parse_args(given)
    install = peer.named_peer(arguments)
    num_rounds = 1 if arguments.quick else arguments.rounds
    found = {}
    for dtype in arguments.dtypes:
        folder = models.demo_model() if arguments.quick else models.small_llava(_DTYPES[dtype])
        found[dtype] = measure(folder, dtype, arguments.images, arguments.batches, num_rounds, install)
        print(section({dtype: found[dtype]}), flush=True)
    figures = {dtype: asdict(one) for dtype, one in found.items()}
    report.publish(_NAME, figures, section(found), is_quick=arguments.quick)


def measure(
    folder: pathlib.Path,
    dtype: str,
    num_images: int,
    batches: Sequence[int],
    num_rounds: int,
    install: peer.PeerInstall | None,
) -> Figures:
    """Measures all sides in turns. The first round warms the caches and is not counted."""
    settings = _settings(model=folder, dtype=dtype, device="cpu")
    model = VisionModel.load(settings.vision)
    model.warm_up()
    files = _image_files(num_images)
    inputs = [
        model.adapter.pixel_inputs(PIL.Image.open(io.BytesIO(file)).convert("RGB"), ProcessorOptions())
        for file in files
    ]
    sides: dict[str, Side] = {_OURS: _Ours(model, inputs), _TRANSFORMERS: _Transformers(folder, dtype, model, inputs)}
    through = asyncio.run(_through_pipeline(settings, model, sides[_OURS], num_images, num_rounds))
    if install is None:
        return _by_turns(dtype, num_images, batches, num_rounds, sides, through)
    with PeerEncoder(install, folder, dtype, inputs) as other:
        sides[_PEER] = other
        return _by_turns(dtype, num_images, batches, num_rounds, sides, through)


def _by_turns(
    dtype: str,
    num_images: int,
    batches: Sequence[int],
    num_rounds: int,
    sides: Mapping[str, Side],
    through: Sequence[tuple[float, float]],
) -> Figures:
    ours = sides[_OURS].rows()
    distance = {name: float((side.rows() - ours).norm() / ours.norm()) for name, side in sides.items() if name != _OURS}
    cells = [Cell(dtype, batch, num_images, {name: [] for name in sides}) for batch in batches]
    for number in range(num_rounds + 1):
        for cell in cells:
            for name in sorted(sides, reverse=number % 2 == 1):
                time.sleep(_PAUSE_S if _PEER in sides else 0.0)
                seconds = sides[name].encode(cell.batch)
                if number:
                    cell.seconds[name].append(seconds)
    return Figures(tuple(cells), distance, tuple(through))


async def _through_pipeline(
    settings: EncoderSettings, model: VisionModel, alone: Side, num_images: int, num_rounds: int
) -> list[tuple[float, float]]:
    """Returns the seconds of the forward pass alone, and of as many image files through the whole pipeline at once."""
    found = []
    with EmbeddedRedis(_REDIS_BYTES) as redis:
        settings = _settings(**(settings.model_dump() | {"redis_url": redis.url}))
        async with open_pipeline(settings, model, CollectorRegistry()) as pipeline:

            async def encode(file: bytes) -> None:
                image = ImageInput(file, None, ProcessorOptions())
                outcome = await pipeline.encode(image, CachePolicy.READ_AND_WRITE, DEFAULT_TENANT, _NAME)
                assert outcome.stored, "the cache is there"

            # The first round starts the decoding processes.
            for number in range(num_rounds + 1):
                forward_s = await asyncio.to_thread(alone.encode, 1)
                files = _image_files(num_images, first=num_images * (number + 1))
                started_s = time.perf_counter()
                await asyncio.gather(*map(encode, files))
                found.append((forward_s, time.perf_counter() - started_s))
    return found[1:]


class _Ours:
    """The model as the forward thread calls it."""

    def __init__(self, model: VisionModel, inputs: Sequence[PixelInputs]) -> None:
        self._model = model
        self._inputs = inputs

    def encode(self, batch: int) -> float:
        started_s = time.perf_counter()
        for begin in range(0, len(self._inputs), batch):
            self._model.forward(self._inputs[begin : begin + batch])
        return time.perf_counter() - started_s

    def rows(self) -> torch.Tensor:
        return torch.stack(self._model.forward(self._inputs)).float()


class _Transformers:
    """`get_image_features` of the same half, as transformers runs it."""

    def __init__(self, folder: pathlib.Path, dtype: str, model: VisionModel, inputs: Sequence[PixelInputs]) -> None:
        self._model: Any = load_vision_half(folder, _DTYPES[dtype])
        self._adapter = model.adapter
        self._inputs = inputs

    def encode(self, batch: int) -> float:
        started_s = time.perf_counter()
        with torch.inference_mode():
            for begin in range(0, len(self._inputs), batch):
                self._adapter.image_rows(self._model, self._inputs[begin : begin + batch])
        return time.perf_counter() - started_s

    def rows(self) -> torch.Tensor:
        with torch.inference_mode():
            return torch.stack(self._adapter.image_rows(self._model, self._inputs)).float()


class PeerEncoder:
    """vLLM's tower and projector in a process of its own interpreter."""

    def __init__(
        self, install: peer.PeerInstall, folder: pathlib.Path, dtype: str, inputs: Sequence[PixelInputs]
    ) -> None:
        """Waits until its engine is ready. Raises PeerError when it does not start."""
        self._num_images = len(inputs)
        self._folder = tempfile.TemporaryDirectory(prefix="lookonce-encode-speed-")
        self._log = pathlib.Path(self._folder.name) / "log"
        pixels = pathlib.Path(self._folder.name) / "pixels.npy"
        np.save(pixels, torch.cat([one.pixel_values for one in inputs]).numpy())
        cpus = sorted(os.sched_getaffinity(0))
        environment = os.environ | _ENVIRONMENT | peer_variables()
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
        if install.preload:
            environment["LD_PRELOAD"] = install.preload
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(install.python), str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        first = {"model": str(folder.resolve()), "dtype": dtype, "cpus": cpus, "pixels": str(pixels)}
        self.version = self._asked(first)["version"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def encode(self, batch: int) -> float:
        return float(self._asked({"batch": batch, "num_images": self._num_images, "rows_file": None})["duration_s"])

    def rows(self) -> torch.Tensor:
        file = pathlib.Path(self._folder.name) / "rows.npy"
        self._asked({"batch": self._num_images, "num_images": self._num_images, "rows_file": str(file)})
        return torch.from_numpy(np.load(file))

    def _asked(self, message: Mapping[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise peer.PeerError(f"the peer has ended:\n{self._log.read_text('utf-8', errors='replace')[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _settings(**values: Any) -> EncoderSettings:
    """Returns settings with `values`; the rest are defaults."""
    return EncoderSettings(**values)


def _image_files(number: int, *, first: int = 0) -> list[bytes]:
    """Returns distinct JPEGs with as much detail as photographs."""
    files = []
    for index in range(first, first + number):
        draw = np.random.default_rng((_SEED, index))
        small = PIL.Image.fromarray(draw.integers(0, 256, (_SIZE[1] // 8, _SIZE[0] // 8, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        small.resize(_SIZE, PIL.Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    return files


def section(figures: Mapping[str, Figures]) -> str:
    """Returns the Markdown of this section of RESULTS.md."""
    sides = [side for side in (_TRANSFORMERS, _PEER) if all(side in one.row_distance for one in figures.values())]
    head = ["dtype", "images in a pass", "images/s"]
    for side in sides:
        head += [f"{side}: images/s", f"lookonce ÷ {side}", "least … most"]
    rows = [_row(cell, sides) for one in figures.values() for cell in one.cells]
    question = (
        "## encode_speed\n\nHow many images a second does the encoder give (small-llava: SigLIP-base, 576 rows), "
        "against the same tower and\nprojector of others? The same pixels, element type and CPUs."
    )
    texts = [_text(dtype, one) for dtype, one in figures.items()]
    return "\n\n".join([question, report.table(head, rows), *texts])


def _row(cell: Cell, sides: Sequence[str]) -> list[str]:
    row = [cell.dtype, str(cell.batch), f"{cell.num_images / statistics.median(cell.seconds[_OURS]):.2f}"]
    for side in sides:
        ratios = cell.ratios(side)
        row += [
            f"{cell.num_images / statistics.median(cell.seconds[side]):.2f}",
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f} … {max(ratios):.2f}",
        ]
    return row


def _text(dtype: str, figures: Figures) -> str:
    distances = ", ".join(f"{value:.1e} ({side})" for side, value in figures.row_distance.items())
    shares = [forward_s / whole_s for forward_s, whole_s in figures.through_pipeline_s]
    return (
        f"{dtype}: distance of the others' rows from ours over the size of ours: {distances}.\n"
        f"JPEG files of {_SIZE[0]} × {_SIZE[1]} through the whole pipeline into Redis: "
        f"{statistics.median(shares):.2f} of the forward's rate ({min(shares):.2f} … {max(shares):.2f})."
    )


if __name__ == "__main__":
    main()
