"""The format of rows outside of the model: the model's own, or int8 with scales (lookonce/store/int8_rows.py).

Conversion happens once, directly after the forward pass, so both caches, ReadEmbedding and results carry equal bytes.
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
    """The model's forward pass, followed by a conversion of rows to `model.row_dtype`.

    Int8 rows are uint8 tensors [num_rows, row_bytes]; each image's rounding error is observed as a metric.
    """
    if model.row_dtype is not RowDtype.INT8_SCALED:
        return model.forward

    def forward(batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
        images = [quantise(rows, model.num_levels) for rows in model.forward(batch)]
        for image in images:
            metrics.int8_relative_error.observe(image.relative_error)
        return [image.data for image in images]

    return forward
