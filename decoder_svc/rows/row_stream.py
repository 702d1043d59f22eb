"""Copies the chunks of a ReadEmbedding stream into a buffer, and rejects any rows that were not requested."""

from __future__ import annotations

from lookonce.content_key import ContentKey
from lookonce.encoder.v1 import encoder_service_pb2
from lookonce.errors import UnavailableError


class RowStreamReader:
    """The state of one stream, which fills `out` with rows [start, stop) of one key."""

    def __init__(self, key: ContentKey, start: int, stop: int, out: memoryview) -> None:
        """`out` has exactly the size of the rows. Raises ValueError for an empty range or a size that cannot fit."""
        if not start < stop or out.nbytes % (stop - start):
            raise ValueError(f"rows [{start}, {stop}) do not fill a buffer of {out.nbytes} bytes")
        self._key = key
        self._start = start
        self._stop = stop
        self._out = out.cast("B")
        self._row_bytes = out.nbytes // (stop - start)
        # The next expected row; None before the first chunk.
        self._next_row: int | None = None

    def take(self, chunk: encoder_service_pb2.ReadEmbeddingResponse) -> None:
        """Copies the next chunk's rows. Raises UnavailableError for a gap, a repetition, or rows of another image."""
        if self._next_row is None:
            self._check_first(chunk)
            self._next_row = self._start
        num_rows, rest = divmod(len(chunk.data), self._row_bytes)
        if rest or chunk.row_offset != self._next_row or self._next_row + num_rows > self._stop:
            raise UnavailableError("the encoder service sent rows that were not asked for; retry")
        begin = (self._next_row - self._start) * self._row_bytes
        self._out[begin : begin + len(chunk.data)] = chunk.data
        self._next_row += num_rows

    def finish(self) -> None:
        """Raises UnavailableError if the stream ended before the last row."""
        if self._next_row != self._stop:
            raise UnavailableError("the encoder service ended before the last row; retry")

    def _check_first(self, chunk: encoder_service_pb2.ReadEmbeddingResponse) -> None:
        info = chunk.embedding
        is_same_key = info.key.digest == self._key.digest and info.key.encoder_fingerprint == self._key.fingerprint
        if not is_same_key:
            raise UnavailableError("the encoder service sent rows of another image; retry")
        if info.num_rows < self._stop or info.size_bytes != info.num_rows * self._row_bytes:
            raise UnavailableError("the encoder service sent rows of another shape; retry")
