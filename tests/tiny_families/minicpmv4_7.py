"""A tiny MiniCPM-V 4.7: MiniCPM-V 4.6 with the ids of markers in its configuration."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers

from tests.tiny_families import minicpmv4_6, parts

NAME = "minicpmv4_7"

MARKERS = {
    "image_start_id": "<image>",
    "image_end_id": "</image>",
    "slice_start_id": "<slice>",
    "slice_end_id": "</slice>",
    "newline_id": "\n",
}


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    return minicpmv4_6.build_as("MiniCPMV4_7", folder, seed, MARKERS)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, minicpmv4_6.processor_class(transformers.MiniCPMV4_7Processor))
