"""Embedding rows on their way from the fetcher to the runner."""

from __future__ import annotations

from dataclasses import dataclass

from decoder_svc.scheduling.row_range import RowRange, RowSource
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
    source: RowSource
    # Number of extra feature levels per row.
    num_levels: int = 0
