"""A vision model whose passes obey a fault file, which is the first argument of the program (faulty_program.py)."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

import torch

from encoder_svc.images.image_inputs import PixelInputs
from encoder_svc.vision.vision_model import VisionModel
from tests.fault_file import FaultFile


class FaultyModel(VisionModel):
    """Obeys the fault file before each pass."""

    def forward(self, batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
        FaultFile(pathlib.Path(sys.argv[1])).obey()
        return super().forward(batch)
