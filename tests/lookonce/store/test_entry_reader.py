"""Rows of an entry arrive whole and verified, by pieces or by one command, and the connection stays in step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lookonce.content_key import ContentKey
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.codec import HEADER_BYTES, EmbeddingCodec
from lookonce.store.entry_reader import EntryReader
from lookonce.store.redis.exchange import Argument, Exchange
from lookonce.store.redis.miss_reason import CacheMissError, CorruptEntryError, MissReason
from lookonce.store.redis.node import RedisNode
from lookonce.store.sealing import Checksum
from tests.lookonce.store.entries import LARGE, SMALL, data_key, fresh_key, make_entry, make_rows

CODEC = EmbeddingCodec(Checksum())
ROWS = make_rows(LARGE)
BUDGET_S = 10.0
WINDOW = 4


class CountingExchange(Exchange):
    """Counts the replies to GETRANGE that are in flight."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange.socket, time.monotonic() + BUDGET_S)
        self.num_in_flight = 0
        self.most_in_flight = 0
        self.num_pieces = 0

    def send(self, *arguments: Argument) -> None:
        if arguments[0] == b"GETRANGE":
            self.num_pieces += 1
            self.num_in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        super().send(*arguments)

    def read_bulk_into(self, view: memoryview) -> int:
        self.num_in_flight -= 1
        return super().read_bulk_into(view)


@pytest.fixture
def exchange(shared_redis: EmbeddedRedis) -> Iterator[CountingExchange]:
    """An exchange whose connection must be in step after the test."""
    node = RedisNode(shared_redis.url, None, BUDGET_S)
    with node.exchange(time.monotonic() + BUDGET_S) as exchange:
        counting = CountingExchange(exchange)
        yield counting
        assert counting.is_idle
    node.retire()


@pytest.fixture
def plant(shared_admin: Any) -> Callable[[bytes | None], ContentKey]:
    """Stores a value under a new key; by default a LARGE entry of ROWS."""

    def plant(value: bytes | None = None) -> ContentKey:
        key = fresh_key()
        shared_admin.set(data_key(key), make_entry(key, LARGE, ROWS) if value is None else value)
        return key

    return plant


Plant = Callable[..., ContentKey]


def reader_of(exchange: Exchange, key: ContentKey) -> EntryReader:
    return EntryReader(exchange, CODEC, data_key(key).encode(), key.value)


def part(start: int, stop: int) -> bytes:
    return ROWS[start * LARGE.row_bytes : stop * LARGE.row_bytes]


@pytest.mark.parametrize("layout", ["unknown", "expected", "other"])
@pytest.mark.parametrize(("start", "stop"), [(0, 60), (0, 1), (59, 60), (12, 14), (13, 26), (5, 47)])
def test_a_range_arrives_with_any_expected_layout(
    exchange: CountingExchange, plant: Plant, layout: str, start: int, stop: int
) -> None:
    layouts = {
        "unknown": None,
        "expected": CODEC.layout(LARGE.num_rows, LARGE.row_bytes),
        "other": CODEC.layout(LARGE.num_rows, LARGE.row_bytes // 2),
    }
    reader, out = reader_of(exchange, plant()), bytearray((stop - start) * LARGE.row_bytes)
    reader.finish_range(reader.begin_range(start, stop, layouts[layout]), memoryview(out))
    assert bytes(out) == part(start, stop)


def test_no_more_pieces_than_the_window_are_in_flight(exchange: CountingExchange, plant: Plant) -> None:
    reader, out = reader_of(exchange, plant()), bytearray(len(ROWS))
    header = reader.begin_range(0, LARGE.num_rows, None)
    reader.finish_range(header, memoryview(out))
    assert bytes(out) == ROWS
    assert exchange.num_pieces > 2 * WINDOW
    assert exchange.most_in_flight == WINDOW


def test_an_expected_layout_requests_pieces_together_with_the_header(exchange: CountingExchange, plant: Plant) -> None:
    reader, out = reader_of(exchange, plant()), bytearray(len(ROWS))
    header = reader.begin_range(0, LARGE.num_rows, CODEC.layout(LARGE.num_rows, LARGE.row_bytes))
    assert exchange.num_in_flight == WINDOW
    reader.finish_range(header, memoryview(out))
    assert bytes(out) == ROWS


def test_one_command_brings_header_and_all_rows(exchange: CountingExchange, plant: Plant) -> None:
    reader, out = reader_of(exchange, plant()), bytearray(len(ROWS))
    reader.finish_whole(reader.begin_whole(), memoryview(out))
    assert bytes(out) == ROWS
    assert exchange.num_pieces == 0


@pytest.mark.parametrize("layout", [None, CODEC.layout(LARGE.num_rows, LARGE.row_bytes)])
def test_an_absent_entry_leaves_the_connection_in_step(exchange: CountingExchange, layout: Any) -> None:
    with pytest.raises(CacheMissError) as caught:
        reader_of(exchange, fresh_key()).begin_range(0, LARGE.num_rows, layout)
    assert caught.value.reason is MissReason.ABSENT
    with pytest.raises(CacheMissError) as caught:
        reader_of(exchange, fresh_key()).begin_whole()
    assert caught.value.reason is MissReason.ABSENT


def test_an_entry_evicted_after_its_header_is_a_miss(
    exchange: CountingExchange, plant: Plant, shared_admin: Any
) -> None:
    key = plant()
    reader, out = reader_of(exchange, key), bytearray(LARGE.row_bytes)
    header = reader.begin_range(0, 1, None)
    shared_admin.delete(data_key(key))
    with pytest.raises(CacheMissError) as caught:
        reader.finish_range(header, memoryview(out))
    assert caught.value.reason is MissReason.EVICTED
    _take_replies(exchange)


def test_an_entry_of_another_shape_than_the_buffer_is_corrupt(exchange: CountingExchange, plant: Plant) -> None:
    reader = reader_of(exchange, plant())
    header = reader.begin_range(0, 2, None)
    with pytest.raises(CorruptEntryError) as caught:
        reader.finish_range(header, memoryview(bytearray(LARGE.row_bytes)))
    assert caught.value.reason is MissReason.OTHER_SHAPE


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda entry: entry[:-1], MissReason.LENGTH),
        (lambda entry: entry + b"x", MissReason.LENGTH),
        (lambda entry: entry[: HEADER_BYTES - 1], MissReason.TOO_SHORT),
    ],
)
def test_a_value_of_another_length_is_corrupt(
    exchange: CountingExchange, shared_admin: Any, change: Callable[[bytes], bytes], reason: MissReason
) -> None:
    key = fresh_key()
    shared_admin.set(data_key(key), change(make_entry(key, SMALL, make_rows(SMALL))))
    with pytest.raises(CorruptEntryError) as caught:
        reader_of(exchange, key).read_header()
    assert caught.value.reason is reason


def test_a_damaged_block_is_found_before_its_rows_are_used(
    exchange: CountingExchange, plant: Plant, shared_admin: Any
) -> None:
    key = plant()
    shared_admin.setrange(data_key(key), HEADER_BYTES + 14 * LARGE.row_bytes, b"damage")
    reader = reader_of(exchange, key)
    out = bytearray(13 * LARGE.row_bytes)
    reader.finish_range(reader.begin_range(0, 13, None), memoryview(out))
    assert bytes(out) == part(0, 13), "the other blocks are good"
    reader = reader_of(exchange, key)
    with pytest.raises(CorruptEntryError) as caught:
        reader.finish_range(reader.begin_range(13, 14, None), memoryview(bytearray(LARGE.row_bytes)))
    assert caught.value.reason is MissReason.BLOCK_SEAL


def _take_replies(exchange: CountingExchange) -> None:
    """Reads the replies that are still in flight, so that the connection is in step."""
    while exchange.num_in_flight:
        exchange.read_bulk_into(memoryview(bytearray(1 << 20)))
