"""How rows leave the encoder: as the model gives them, or as int8 with scales (lookonce/store/int8_rows.py).

What is made here of a forward pass is what every path carries: both caches, ReadEmbedding, rows in a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from encoder_svc.images.image_inputs import PixelInputs
from encoder_svc.metrics import EncoderMetrics
from encoder_svc.vision.vision_model import VisionModel
from lookonce.embedding_meta import RowDtype
from lookonce.store.int8_rows import quantise


def stored_forward(
    model: VisionModel, metrics: EncoderMetrics
) -> Callable[[Sequence[PixelInputs]], list[torch.Tensor]]:
    """The model's forward pass with rows as they are stored: of `model.row_dtype`.

    Int8 rows are uint8 tensors [num_rows, row_bytes]; what each image loses by them is observed.
    """
    if model.row_dtype is not RowDtype.INT8_SCALED:
        return model.forward

    def forward(batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
        images = [quantise(rows, model.num_levels) for rows in model.forward(batch)]
        for image in images:
            metrics.int8_relative_error.observe(image.relative_error)
        return [image.data for image in images]

    return forward
