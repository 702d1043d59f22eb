"""Reads one entry's header and rows over one exchange: pieces of a range, or the whole by one command.

Rows are received where the caller wants them, and no block is believed before its seal was checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from lookonce.store import codec as embedding_codec
from lookonce.store.codec import HEADER_BYTES, BlockLayout, BlockSpan, EmbeddingCodec, EntryHeader
from lookonce.store.redis.exchange import Exchange
from lookonce.store.redis.miss_reason import CacheMissError, CorruptEntryError, MissReason

# A read in pieces keeps at most this many of this size on their way, so that small operations beside it stay quick:
# p99.9 of a small GET beside two readers of 24 MB over TCP was 4.5 ms, with three of 1 MiB 5.6 ms (2 cores).
_PIECE_BYTES = 512 << 10
_WINDOW_PIECES = 4


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one GETRANGE asks for; never crosses a block's border."""

    # From the start of the entry.
    offset: int
    length: int


class EntryReader:
    """The value under one name. Every method raises CacheMissError, and CorruptEntryError for what should go."""

    def __init__(self, exchange: Exchange, codec: EmbeddingCodec, name: bytes, key: bytes) -> None:
        """`key` is what the entry must say it belongs to."""
        self._exchange = exchange
        self._codec = codec
        self._name = name
        self._key = key
        # Of the range that is being read.
        self._spans: tuple[BlockSpan, ...] = ()
        self._upcoming: Iterator[_Piece] = iter(())
        self._outstanding: deque[_Piece] = deque()

    def read_header(self) -> EntryHeader:
        """The checked header of an entry whose length is right. One round trip."""
        self._ask_for_header()
        return self._receive_header()

    def begin_range(self, start: int, stop: int, expected: BlockLayout | None) -> EntryHeader:
        """The checked header of an entry of which `finish_range` takes rows [start, stop).

        The first pieces are asked for together with the header when the entry is expected to have a certain layout. One
        that has another, an older writer's, costs their transfer; one that is absent costs nothing.
        """
        self._ask_for_header()
        if expected is not None and stop <= expected.num_rows:
            self._plan(embedding_codec.block_span(expected, start, stop))
            self._ask_ahead()
        try:
            header = self._receive_header()
        except CacheMissError as miss:
            if miss.reason is MissReason.ABSENT:
                self._drop_outstanding()
            raise
        spans = embedding_codec.block_span(header.layout, start, stop)
        if spans != self._spans:
            self._drop_outstanding()
            self._plan(spans)
        return header

    def finish_range(self, header: EntryHeader, out: memoryview) -> None:
        """The rows into `out`, by the pieces of the blocks that cover them."""
        _check_size(self._spans, out)
        # Only a block at either end is needed in part; whole ones are received where they belong.
        partial_bytes = (span.length for span in self._spans if span.take_bytes < span.length)
        scratch = memoryview(bytearray(max(partial_bytes, default=0)))
        filled_bytes = 0
        for span in self._spans:
            is_whole = span.take_bytes == span.length
            target = out[filled_bytes : filled_bytes + span.length] if is_whole else scratch[: span.length]
            self._receive_pieces(target)
            embedding_codec.open_block(header, span.index, target, target)
            if not is_whole:
                needed = target[span.skip_bytes : span.skip_bytes + span.take_bytes]
                out[filled_bytes : filled_bytes + span.take_bytes] = needed
            filled_bytes += span.take_bytes

    def begin_whole(self) -> EntryHeader:
        """The checked header of an entry all of whose rows `finish_whole` takes. One command for both.

        Only for a server that does not copy the value for it: the whole reply is under way from now on.
        """
        self._exchange.send(b"GET", self._name)
        entry_bytes = self._exchange.begin_bulk()
        if entry_bytes is None:
            raise CacheMissError(MissReason.ABSENT)
        if entry_bytes < HEADER_BYTES:
            raise CorruptEntryError(MissReason.TOO_SHORT)
        data = memoryview(bytearray(HEADER_BYTES))
        self._exchange.receive_bulk(data)
        header = self._codec.parse_header(data, self._key)
        embedding_codec.check_length(header, entry_bytes)
        return header

    def finish_whole(self, header: EntryHeader, out: memoryview) -> None:
        """All rows into `out`; a block is checked while the next one arrives."""
        spans = embedding_codec.block_span(header.layout, 0, header.meta.num_rows)
        _check_size(spans, out)
        filled_bytes = 0
        for span in spans:
            target = out[filled_bytes : filled_bytes + span.length]
            self._exchange.receive_bulk(target)
            embedding_codec.open_block(header, span.index, target, target)
            filled_bytes += span.length
        self._exchange.end_bulk()

    def _ask_for_header(self) -> None:
        self._exchange.send(b"GETRANGE", self._name, 0, HEADER_BYTES - 1)
        self._exchange.send(b"STRLEN", self._name)

    def _receive_header(self) -> EntryHeader:
        data = memoryview(bytearray(HEADER_BYTES))
        num_bytes = self._exchange.read_bulk_into(data)
        entry_bytes = self._exchange.read_integer()
        if num_bytes == 0:
            raise CacheMissError(MissReason.ABSENT)
        header = self._codec.parse_header(data[:num_bytes], self._key)
        embedding_codec.check_length(header, entry_bytes)
        return header

    def _plan(self, spans: tuple[BlockSpan, ...]) -> None:
        self._spans = spans
        self._upcoming = _pieces(spans)

    def _ask_ahead(self) -> None:
        """As many pieces as may be on their way."""
        while len(self._outstanding) < _WINDOW_PIECES and (piece := next(self._upcoming, None)) is not None:
            self._exchange.send(b"GETRANGE", self._name, piece.offset, piece.offset + piece.length - 1)
            self._outstanding.append(piece)

    def _drop_outstanding(self) -> None:
        """Takes the replies to pieces that are not wanted after all, so that the connection can be used again."""
        scratch = memoryview(bytearray(max((piece.length for piece in self._outstanding), default=0)))
        while self._outstanding:
            self._exchange.read_bulk_into(scratch[: self._outstanding.popleft().length])

    def _receive_pieces(self, target: memoryview) -> None:
        """Fills `target`; asks for the next pieces of the read meanwhile."""
        received_bytes = 0
        while received_bytes < target.nbytes:
            self._ask_ahead()
            length = self._outstanding.popleft().length
            num_bytes = self._exchange.read_bulk_into(target[received_bytes : received_bytes + length])
            if num_bytes == 0:
                raise CacheMissError(MissReason.EVICTED)
            if num_bytes != length:
                raise CorruptEntryError(MissReason.LENGTH)
            received_bytes += length


def _pieces(spans: tuple[BlockSpan, ...]) -> Iterator[_Piece]:
    for span in spans:
        for offset in range(0, span.length, _PIECE_BYTES):
            yield _Piece(span.offset + offset, min(_PIECE_BYTES, span.length - offset))


def _check_size(spans: tuple[BlockSpan, ...], out: memoryview) -> None:
    if out.nbytes != sum(span.take_bytes for span in spans):
        raise CorruptEntryError(MissReason.OTHER_SHAPE)
