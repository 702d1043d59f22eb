"""Embedding rows on the device: ranges come and go, and no token is ever computed without its row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.runner.host_transfer import HostTransfer
from decoder_svc.runner.row_cache import RowCache
from decoder_svc.scheduling.prompt import ImageItem, Span
from decoder_svc.scheduling.row_range import RowRange
from lookonce.content_key import DEFAULT_TENANT, EncoderFingerprint, ProcessorOptions, content_key, image_digest
from lookonce.embedding_meta import RowDtype

WIDTH, NUM_ROWS, OFFSET = 2, 10, 3
OPTIONS = ProcessorOptions()
KEY = content_key(image_digest(b"a"), EncoderFingerprint("f" * 64), OPTIONS, DEFAULT_TENANT)
OTHER_KEY = content_key(image_digest(b"b"), EncoderFingerprint("f" * 64), OPTIONS, DEFAULT_TENANT)
# Row i holds i + 1 in every element.
ROWS = torch.arange(1.0, NUM_ROWS + 1)[:, None].repeat(1, WIDTH)


def fetched(start: int, stop: int) -> FetchedRows:
    data = bytearray(ROWS[start:stop].numpy().tobytes())
    return FetchedRows(KEY, RowRange(start, stop), data, RowDtype.FLOAT32)


def item(row_tokens: tuple[int, ...] | None = None, length: int = NUM_ROWS) -> ImageItem:
    """The image, whose tokens begin at token OFFSET of the prompt."""
    return ImageItem(KEY, Span(OFFSET, length), NUM_ROWS, OPTIONS, None, row_tokens)


def cache_with(*ranges: tuple[int, int]) -> RowCache:
    cache = RowCache(HostTransfer(torch.device("cpu")), torch.float32)
    for start, stop in ranges:
        cache.put(fetched(start, stop))
    return cache


def placed(cache: RowCache, start: int, stop: int, image: ImageItem | None = None) -> list[float]:
    """The first element of every token of a chunk [start, stop); 0 where no row was written."""
    embeddings = torch.zeros(stop - start, WIDTH)
    indexes = cache.place(embeddings, 0, image or item(), start, stop)
    assert [index for index, row in enumerate(embeddings) if row.any()] == sorted(indexes)
    values: list[float] = embeddings[:, 0].tolist()
    return values


def test_rows_are_written_over_the_tokens_of_the_chunk() -> None:
    cache = cache_with((0, NUM_ROWS))
    assert placed(cache, 1, 6) == [0, 0, 1, 2, 3]
    assert placed(cache, 11, 15) == [9, 10, 0, 0]
    assert placed(cache, 13, 20) == [0] * 7


def test_rows_of_several_ranges_join() -> None:
    assert placed(cache_with((4, 6), (0, 4), (6, NUM_ROWS)), 5, 10) == [3, 4, 5, 6, 7]


def test_tokens_between_rows_are_left_alone() -> None:
    """An image whose tokens 0, 1, 3 and 4 take rows, with a line break between."""
    tokens = (0, 1, 3, 4, *range(5, 11))
    assert placed(cache_with((0, NUM_ROWS)), 3, 8, item(tokens, 11)) == [1, 2, 0, 3, 4]


def test_a_missing_row_is_an_error() -> None:
    cache = cache_with((0, 4), (6, NUM_ROWS))
    with pytest.raises(KeyError, match="2 embedding rows"):
        placed(cache, OFFSET, OFFSET + NUM_ROWS)
    with pytest.raises(KeyError):
        placed(cache_with(), OFFSET, OFFSET + 1)


@given(
    dropped=st.lists(
        st.tuples(st.integers(0, NUM_ROWS), st.integers(0, NUM_ROWS)).filter(lambda pair: pair[0] < pair[1]), max_size=4
    )
)
def test_dropping_leaves_exactly_the_other_rows(dropped: list[tuple[int, int]]) -> None:
    cache, left = cache_with((0, 3), (3, NUM_ROWS)), set(range(NUM_ROWS))
    for start, stop in dropped:
        cache.drop(KEY, RowRange(start, stop))
        left -= set(range(start, stop))
    assert len(cache) == len(left)
    for row in range(NUM_ROWS):
        if row in left:
            assert placed(cache, OFFSET + row, OFFSET + row + 1) == [row + 1]
        else:
            with pytest.raises(KeyError):
                placed(cache, OFFSET + row, OFFSET + row + 1)


def test_a_remaining_part_does_not_keep_the_memory_of_dropped_rows() -> None:
    cache = cache_with((0, NUM_ROWS))
    cache.drop(KEY, RowRange(1, NUM_ROWS))
    (rows,) = cache._parts[KEY].values()
    assert rows.untyped_storage().nbytes() == WIDTH * 4


def test_dropping_an_unknown_key_changes_nothing() -> None:
    cache = cache_with((0, 2))
    cache.drop(OTHER_KEY, RowRange(0, 2))
    assert len(cache) == 2


def test_without_memory_for_a_copy_rows_that_stay_are_kept_and_others_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of the image were lost, while the scheduler counted on those that stay."""

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError

    cache = cache_with((0, NUM_ROWS))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", no_memory)
        cache.drop(KEY, RowRange(5, NUM_ROWS))
    assert len(cache) == 5
    assert placed(cache, OFFSET, OFFSET + 5) == [1, 2, 3, 4, 5]
