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
    # [len(rows), row_bytes] little-endian, row-major, as `dtype` lays them out.
    data: bytearray
    dtype: RowDtype
    source: RowSource
    # Extra feature levels of each row.
    num_levels: int = 0
