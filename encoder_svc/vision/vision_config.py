"""The choices by which a vision model is loaded. Imports nothing heavy, so that settings can build one."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The encoder settings that decide what its vision model computes."""

    # Model folder of Hugging Face.
    model: pathlib.Path
    # A value of `--device`.
    device: str = "auto"
    # Element type of weights and forward pass; auto: the type of the checkpoint.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # Rows as the model gives them, or rounded to int8.
    row_format: Literal["native", "int8"] = "native"
