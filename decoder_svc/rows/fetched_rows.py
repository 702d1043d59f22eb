"""Embedding rows on their way from the fetcher to the runner."""

from __future__ import annotations

from dataclasses import dataclass

from decoder_svc.scheduling.row_range import RowRange
from lookonce.content_key import ContentKey
from lookonce.embedding_meta import RowDtype


@dataclass(frozen=True, slots=True)
class FetchedRows:
    """A range of one image's rows in host memory."""

    key: ContentKey
    rows: RowRange
    # [len(rows), row_bytes], little-endian, row-major; `dtype` defines a row's layout.
    data: bytearray
    dtype: RowDtype
    # Number of extra feature levels per row.
    num_levels: int = 0
    # Rows of the image, also outside this range, that an encoder computed for this decoder and that were not reported
    # before. 0: they come from a cache, or from an encode that another caller counts.
    num_encoded_rows: int = 0
