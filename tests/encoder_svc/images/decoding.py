"""Decodes images in a decoding process, for the tests of formats."""

from __future__ import annotations

import numpy as np

from encoder_svc.images.decode_worker import DecodeWorker
from lookonce.media.image_header import ImageLimits, probe_image

LIMITS = ImageLimits(max_bytes=20 << 20, max_pixels=50_000_000, max_aspect=200.0)


def decoded(worker: DecodeWorker, data: bytes) -> np.ndarray:
    """Pixels [height, width, 3] from the decoding process. Format and size are those of the header."""
    image, header = worker.decode(data)
    assert probe_image(data, LIMITS) == header
    assert image.size == (header.width, header.height)
    return np.asarray(image).astype(int)
