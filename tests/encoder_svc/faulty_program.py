"""Runs the encoder service with forward passes that obey a fault file.

Usage: `python -m tests.encoder_svc.faulty_program FILE …`, followed by the service's flags.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

import torch

from encoder_svc.__main__ import serve
from encoder_svc.images.image_inputs import PixelInputs
from encoder_svc.vision import vision_model
from lookonce.server import serving
from tests.fault_file import FaultFile


class FaultyModel(vision_model.VisionModel):
    """A vision model that obeys the fault file before each pass."""

    def forward(self, batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
        FaultFile(pathlib.Path(sys.argv[1])).obey()
        return super().forward(batch)


if __name__ == "__main__":
    vision_model.VisionModel = FaultyModel  # type: ignore[misc]
    serving.run(serve(sys.argv[2:]))
