"""Embedding rows on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.runner.host_transfer import HostTransfer
from decoder_svc.scheduling.prompt import ImageItem
from decoder_svc.scheduling.row_range import RowRange, RowRangeSet
from lookonce.content_key import ContentKey
from lookonce.embedding_meta import RowDtype
from lookonce.model.lack_of_memory import is_lack_of_memory
from lookonce.store.int8_rows import dequantise

# Element types of rows that are plain floats.
TORCH_DTYPES = {
    RowDtype.FLOAT32: torch.float32,
    RowDtype.FLOAT16: torch.float16,
    RowDtype.BFLOAT16: torch.bfloat16,
}
ROW_DTYPES = {torch_dtype: row_dtype for row_dtype, torch_dtype in TORCH_DTYPES.items()}


class RowCache:
    """Row ranges by content key. The scheduler's EncoderCacheManager decides what is evicted."""

    def __init__(self, transfer: HostTransfer, dtype: torch.dtype) -> None:
        self._transfer = transfer
        self._dtype = dtype
        # Disjoint row ranges of each image, in order of arrival.
        self._parts: dict[ContentKey, dict[RowRange, Tensor]] = {}

    def __len__(self) -> int:
        """Number of rows on the device."""
        return sum(len(rows) for parts in self._parts.values() for rows in parts)

    def put(self, fetched: FetchedRows) -> None:
        """Copies fetched rows to the device as `[len(rows), row_elements]` in the model's dtype."""
        is_int8 = fetched.dtype is RowDtype.INT8_SCALED
        host_dtype = torch.uint8 if is_int8 else TORCH_DTYPES[fetched.dtype]
        host = torch.frombuffer(fetched.data, dtype=host_dtype).view(len(fetched.rows), -1)
        with self._transfer.overlapping_steps():
            moved = self._transfer.move(host)
            values = dequantise(moved, fetched.num_levels, self._dtype) if is_int8 else moved.to(self._dtype)
        self._transfer.mark_used_by_steps(values)
        self._parts.setdefault(fetched.key, {})[fetched.rows] = values

    def drop(self, key: ContentKey, dropped: RowRange) -> None:
        """Frees rows of a key."""
        self._transfer.wait_for_overlapping()
        kept: dict[RowRange, Tensor] = {}
        for rows, values in self._parts.get(key, {}).items():
            outside = RowRangeSet([rows])
            outside.remove(dropped)
            for part in outside:
                kept[part] = (
                    values if part == rows else _copied(values[part.start - rows.start : part.stop - rows.start])
                )
        if kept:
            self._parts[key] = kept
        else:
            self._parts.pop(key, None)

    def place(self, embeddings: Tensor, first: int, item: ImageItem, start: int, stop: int) -> list[int]:
        """Writes an image's rows over its placeholders among the prompt's tokens [start, stop).

        `embeddings` is the step's `[num_tokens, row_elements]`, in which token `start` has index `first`. Returns the
        indexes that were written. Raises KeyError if a row is missing: a step must never be computed without it.
        """
        row_start, row_stop = item.rows_between(start, stop)
        if row_start == row_stop:
            return []
        tokens = [first + token - start for token in item.tokens_with_row(start, stop)]
        self._transfer.wait_for_overlapping()
        num_placed = 0
        for rows, values in self._parts[item.key].items():
            begin, end = max(rows.start, row_start), min(rows.stop, row_stop)
            if begin < end:
                # Indexing with a list would make the host wait for the device.
                places = self._transfer.move(torch.tensor(tokens[begin - row_start : end - row_start]))
                embeddings.index_copy_(0, places, values[begin - rows.start : end - rows.start])
                num_placed += end - begin
        if num_placed != row_stop - row_start:
            raise KeyError(f"{row_stop - row_start - num_placed} embedding rows are not on the device")
        return tokens


def _copied(rows: Tensor) -> Tensor:
    """Returns a copy of a view, which would keep the memory of dropped rows. Without memory for it: the view."""
    try:
        return rows.clone()
    except (MemoryError, RuntimeError) as error:
        if not is_lack_of_memory(error):
            raise
        return rows
