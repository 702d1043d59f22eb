"""How far are the pixels of the PIL image processors from those of torchvision? `--help` lists the options.

Both process the same pictures for every family, and videos where it takes them, against transformers' video processors;
differences are in steps of an 8-bit channel. Needs torchvision, which `make venv` installs into .venv/torchvision.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import numpy as np
import PIL.Image
import torch

from benchmarks import report
from lookonce.model.libraries import torchvision_import

_NAME = "pixel_parity"
# Here `make venv` installs torchvision.
INSTALLED = pathlib.Path(sys.prefix) / "torchvision"
# Tiny model, its video processor, and settings of it: bounds of each frame, and of all frames together.
VIDEO_PROCESSORS: tuple[tuple[str, tuple[str, dict[str, Any]]], ...] = (
    ("qwen2_vl", ("Qwen2VLVideoProcessor", {"size": {"shortest_edge": 3136, "longest_edge": 200_000}})),
    ("qwen2_5_vl", ("Qwen2VLVideoProcessor", {"size": {"shortest_edge": 3136, "longest_edge": 90_000}})),
    ("qwen3_vl", ("Qwen3VLVideoProcessor", {"size": {"shortest_edge": 4096, "longest_edge": 400_000}})),
)
SIZES = ((80, 60), (640, 480), (1280, 720), (300, 400), (1000, 200))


@dataclass(frozen=True, slots=True)
class Difference:
    """Pixel differences of one family over all pictures, in 1/255 of a channel's range."""

    name: str
    processor: str
    largest: float
    mean: float


def main(given: Sequence[str] | None = None) -> None:
    """Compares every family, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument(
        "--torchvision",
        type=pathlib.Path,
        default=pathlib.Path(sys.prefix) / "torchvision",
        help="folder that torchvision was installed into",
    )
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    version = _import_torchvision(arguments.torchvision)
    # Imported late: transformers looks for torchvision once, when it is imported.
    from tests.tiny_families import ALL_FAMILIES as FAMILIES
    from tests.torchvision_families import TORCHVISION_FAMILIES

    names, videos = sorted(FAMILIES.keys() - TORCHVISION_FAMILIES), VIDEO_PROCESSORS
    if arguments.quick:
        names, videos = ["llava_siglip"], videos[:1]
    differences = [compare(FAMILIES[name]) for name in names]
    differences += [compare_videos(FAMILIES[name], *settings) for name, settings in videos]
    figures = {"differences": [asdict(one) for one in differences]}
    report.publish(_NAME, figures, _section(differences, version), is_quick=arguments.quick)


def compare(family: ModuleType) -> Difference:
    """Both backends on the same pictures. Raises ValueError when they give other shapes, or are one and the same."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as base:
        folder = family.build(pathlib.Path(base) / family.NAME)
        pil, other = (
            transformers.AutoImageProcessor.from_pretrained(folder, backend=backend)
            for backend in ("pil", "torchvision")
        )
    if pil.backend == other.backend:
        raise ValueError(f"{family.NAME} has no processor for torchvision, or torchvision was not found")
    found = [_steps(pil, other, picture(index, *size)) for index, size in enumerate(SIZES)]
    largest, mean = max(one.max().item() for one in found), float(np.mean([one.mean().item() for one in found]))
    print(f"{family.NAME}: largest {largest:.2f}, mean {mean:.3f}", flush=True)
    return Difference(family.NAME, type(pil).__name__, largest, mean)


def compare_videos(family: ModuleType, processor_name: str, settings: Mapping[str, Any]) -> Difference:
    """The family's video processor and our pairs, on the same frames. Raises ValueError for other shapes."""
    import transformers

    from encoder_svc.images.image_inputs import VisionAdapter
    from lookonce.content_key import ProcessorOptions
    from lookonce.model.model_folder import ModelFolder

    with tempfile.TemporaryDirectory() as base:
        folder = family.build(pathlib.Path(base) / family.NAME)
        (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
        processor = getattr(transformers, processor_name).from_pretrained(folder)
        adapter = VisionAdapter.load(ModelFolder.open(folder))
    found = []
    for index, (size, num_frames) in enumerate(itertools.product(SIZES, (2, 5, 8))):
        frames = [picture(100 * index + number, *size) for number in range(num_frames)]
        theirs = processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
        frame_size = adapter.model.frame_size(*size, num_frames, None)
        options = ProcessorOptions(frame_size=frame_size)
        pairs = [frames[start : start + 2] for start in range(0, num_frames, 2)]
        ours = torch.cat([adapter.frame_inputs(pair, options).pixel_values for pair in pairs])
        if ours.shape != theirs["pixel_values_videos"].shape:
            raise ValueError(f"{family.NAME}: {tuple(ours.shape)} and {tuple(theirs['pixel_values_videos'].shape)}")
        scale = 255 * min(processor.image_std)
        found.append((ours.double() - theirs["pixel_values_videos"].double()).abs() * scale)
    largest, mean = max(one.max().item() for one in found), float(np.mean([one.mean().item() for one in found]))
    print(f"{family.NAME} videos: largest {largest:.2f}, mean {mean:.3f}", flush=True)
    return Difference(f"{family.NAME}, videos", processor_name, largest, mean)


def picture(seed: int, width: int, height: int) -> PIL.Image.Image:
    """Smooth colours, one sharp rectangle and noise."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (max(2, height // 16), max(2, width // 16), 3), dtype=np.uint8)
    smooth = PIL.Image.fromarray(coarse).resize((width, height), PIL.Image.Resampling.BICUBIC)
    pixels = np.array(smooth, dtype=np.int64)
    pixels[height // 3 : height // 2, width // 4 : width // 2] = draw.integers(0, 256, 3)
    return PIL.Image.fromarray(np.clip(pixels + draw.integers(-12, 13, pixels.shape), 0, 255).astype(np.uint8))


def _steps(pil: Any, other: Any, image: PIL.Image.Image) -> torch.Tensor:
    """Returns the absolute differences of all pixel values in units of the smallest channel scale."""
    one, two = (each(images=[[image]], return_tensors="pt")["pixel_values"].double() for each in (pil, other))
    if one.shape != two.shape:
        raise ValueError(f"{type(pil).__name__}: {tuple(one.shape)} and {tuple(two.shape)}")
    scale = 255 * min(pil.image_std)
    return (one - two).abs() * scale


def _import_torchvision(folder: pathlib.Path) -> str:
    sys.path.insert(0, str(folder))
    return str(torchvision_import.import_torchvision().__version__).partition("+")[0]


def _section(differences: Sequence[Difference], version: str) -> str:
    rows = [[f"`{one.name}`", f"`{one.processor}`", f"{one.largest:.2f}", f"{one.mean:.3f}"] for one in differences]
    return "\n\n".join(
        [
            "## pixel_parity\n\nHow far are pixels of the PIL image processors, which Lookonce uses, from those of "
            "the torchvision\nones? In steps of an 8-bit channel (1/255 of its range).",
            report.table(["tiny model", "processor", "largest", "mean"], rows),
            f"{len(SIZES)} pictures from 80×60 to 1280×720, tiny models' processor settings, torchvision {version}. "
            "The backend is\npart of the encoder's fingerprint, so rows of the two are never mixed.",
        ]
    )


if __name__ == "__main__":
    main()
