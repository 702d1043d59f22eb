"""Embedding rows on their way from the fetcher to the runner."""

from __future__ import annotations

from dataclasses import dataclass

from decoder_svc.request import RowSource
from lookonce.content_key import ContentKey
from lookonce.embedding_meta import RowDtype


@dataclass(frozen=True, slots=True)
class FetchedRows:
    """Rows of one image in host memory."""

    key: ContentKey
    # [num_rows, row_elements] little-endian, row-major.
    data: bytearray
    num_rows: int
    dtype: RowDtype
    source: RowSource
