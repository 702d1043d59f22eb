"""The tensors behind the encoder-cache accounting: rows of images on the device, and gathering them by range."""

from __future__ import annotations

import torch
from torch import Tensor

from decoder_svc.fetched_rows import FetchedRows
from decoder_svc.request import ImageItem
from lookonce.content_key import ContentKey
from lookonce.embedding_meta import RowDtype

_TORCH_DTYPES = {
    RowDtype.FLOAT32: torch.float32,
    RowDtype.FLOAT16: torch.float16,
    RowDtype.BFLOAT16: torch.bfloat16,
}


class RowCache:
    """Rows by content key. What may stay and what must go is the EncoderCacheManager's decision."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._rows: dict[ContentKey, Tensor] = {}

    def put(self, fetched: FetchedRows) -> None:
        """Takes rows from host memory; `[num_rows, row_elements]` in the model's dtype."""
        rows = torch.frombuffer(fetched.data, dtype=_TORCH_DTYPES[fetched.dtype]).view(fetched.num_rows, -1)
        self._rows[fetched.key] = rows.to(self._device, self._dtype)

    def drop(self, key: ContentKey) -> None:
        """Frees the rows of a key."""
        self._rows.pop(key, None)

    def place(self, embeddings: Tensor, first: int, item: ImageItem, start: int, stop: int) -> None:
        """Writes the rows of an image over its placeholders among the prompt's tokens [start, stop).

        `embeddings` is the step's `[num_tokens, hidden]`, in which token `start` has index `first`.
        """
        row_start, row_stop = item.rows_between(start, stop)
        if row_start == row_stop:
            return
        rows = self._rows[item.key][row_start:row_stop]
        tokens = [first + token - start for token in item.tokens_with_row(start, stop)]
        embeddings[tokens] = rows
