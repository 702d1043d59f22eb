"""Which embedding rows the coming tokens of requests take: asked for, waited for, passed and accounted for.

The scheduler's half that knows images. The scheduler decides who may ask, and when; the EncoderCacheManager what there
is room for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from decoder_svc.scheduling.encoder_cache_manager import EncoderCacheManager, RowUser, row_user
from decoder_svc.scheduling.prompt import ImageItem
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.row_range import RowRange, RowSource
from decoder_svc.scheduling.scheduler_output import RowFetch
from lookonce.content_key import ContentKey


@dataclass(slots=True)
class _ImageProgress:
    """The images of one request: how far its computed tokens have passed them, and where their rows came from."""

    # Rows of each image whose tokens were in the prefix cache when the request was first admitted.
    num_skipped_rows: list[int]
    # Images before this index are computed to their last token.
    num_passed: int = 0
    # Images before this index are counted in the request's usage. A recomputation after preemption counts none again.
    num_accounted: int = 0
    # Source of each image's rows when this request first had room for all of them; None: they were not resident yet.
    sources: dict[ContentKey, RowSource | None] = field(default_factory=dict)


class RowDemand:
    """Keeps every request's claims on rows true as its computed tokens advance. One step at a time."""

    def __init__(
        self, encoder_cache: EncoderCacheManager, max_num_rows_asked: int, *, overlap_encode: bool = True
    ) -> None:
        """`max_num_rows_asked` bounds the rows asked for in one step; a single larger image still is asked for.

        `overlap_encode` False: a request computes nothing while rows that it has asked for are on their way.
        """
        self._cache = encoder_cache
        self._overlap_encode = overlap_encode
        self._max_num_rows_asked = max_num_rows_asked
        self._progress: dict[RequestId, _ImageProgress] = {}
        # Of the step in hand.
        self._row_budget = max_num_rows_asked
        self._fetches: list[RowFetch] = []
        # The first in line found no room for its rows: nobody behind it may take any.
        self._is_short = False
        self._has_deferred = False

    def begin_step(self) -> None:
        """From here on it is another step's budget."""
        self._row_budget = self._max_num_rows_asked
        self._fetches = []
        self._is_short = False
        self._has_deferred = False

    @property
    def fetches(self) -> tuple[RowFetch, ...]:
        """What this step has asked for."""
        return tuple(self._fetches)

    @property
    def has_deferred(self) -> bool:
        """Whether somebody was refused rows in this step that the next one may give."""
        return self._has_deferred

    def add(self, request: Request) -> None:
        """Starts tracking the images of a request, which has no computed tokens yet."""
        self._progress[request.request_id] = _ImageProgress([0] * len(request.prompt.images))

    def remove(self, request: Request) -> None:
        """Releases the rows of a request that ended, and stops tracking it."""
        self._release(request)
        del self._progress[request.request_id]

    def restart(self, request: Request) -> None:
        """Releases the rows of a preempted request, which is computed again from its first token."""
        self._release(request)
        self._progress[request.request_id].num_passed = 0

    def ask(self, request: Request, start: int, least: int, *, is_first: bool, may_displace: bool) -> None:
        """Asks for the rows that the request's tokens from `start` on take and that nobody has asked for.

        `least` is the smallest number of tokens with which the request could go on; only for those may it, where
        `may_displace` says so, take the place of rows that requests behind it need. `is_first`: of those that wait, or
        of all that run, nobody stands before it in the order of service who could take the room that it waits for.
        """
        for index, item, rows in self._images_from(request, start):
            user = row_user(request, index)
            self._cache.need(item.key, user, rows)
            is_first_missing = item.token_of_row(rows.start) < start + least
            displacing = user if is_first_missing and may_displace else None
            for part in self._cache.unasked(item.key, rows):
                if not self._reserve(item, part, displacing, request.request_id):
                    self._is_short |= is_first_missing and is_first
                    return
            self._note_source(request, item, rows)

    def runnable_stop(self, request: Request, start: int) -> int:
        """One past the last token from `start` on before the first row that is not on the device."""
        if not self._overlap_encode and self._is_any_arriving(request, start):
            return start
        for _, item, rows in self._images_from(request, start):
            missing = self._cache.first_missing_row(item.key, rows)
            if missing is not None:
                return item.token_of_row(missing)
        return request.num_tokens

    def has_asked_for_all(self, request: Request, start: int) -> bool:
        """Whether there is room for all rows that the request's tokens from `start` on take."""
        return not any(self._cache.unasked(item.key, rows) for _, item, rows in self._images_from(request, start))

    def renew(self, request: Request) -> None:
        """Says again what the request needs, because its place in the order of service has changed."""
        for index, item, rows in self._images_from(request, request.num_computed_tokens):
            self._cache.need(item.key, row_user(request, index), rows)

    def account_for_hit(self, request: Request, num_tokens: int) -> None:
        """The prefix cache had the tokens up to `num_tokens`: the rows under them are not needed at all."""
        for index, item in enumerate(request.prompt.images):
            first, last = item.rows_between(request.num_computed_tokens, num_tokens)
            self._progress[request.request_id].num_skipped_rows[index] += last - first
            request.usage.skipped_image_tokens += last - first

    def pass_computed(self, request: Request) -> None:
        """Gives up the claim on every image whose tokens are all computed, and accounts for it once."""
        images = request.prompt.images
        progress = self._progress[request.request_id]
        while progress.num_passed < len(images):
            index, item = progress.num_passed, images[progress.num_passed]
            if item.span.stop > request.num_computed_tokens:
                return
            progress.num_passed += 1
            if index >= progress.num_accounted:
                progress.num_accounted = index + 1
                self._account(request, progress, index)
            self._cache.release(item.key, request.request_id, index)

    def takes_any(self, request: Request, key: ContentKey, rows: RowRange, *, had_data: bool) -> bool:
        """Whether the request cannot go on when these rows do not come.

        A fetch without the image's bytes fails only requests that have no bytes either; the others ask again.
        """
        return any(
            item.key == key
            and (had_data or item.data is None)
            and needed.start < rows.stop
            and rows.start < needed.stop
            for _, item, needed in self._images_from(request, request.num_computed_tokens)
        )

    def _release(self, request: Request) -> None:
        for index, item in enumerate(request.prompt.images):
            self._cache.release(item.key, request.request_id, index)

    def _is_any_arriving(self, request: Request, start: int) -> bool:
        return any(self._cache.is_any_arriving(item.key, rows) for _, item, rows in self._images_from(request, start))

    def _reserve(self, item: ImageItem, rows: RowRange, displacing: RowUser | None, request_id: RequestId) -> bool:
        """Asks for rows that nobody has asked for; False when budget or room are short."""
        if self._is_short or (self._fetches and len(rows) > self._row_budget):
            self._has_deferred = True
            return False
        if not self._cache.can_reserve(len(rows), displacing):
            return False
        self._cache.reserve(item.key, rows, displacing)
        self._row_budget -= len(rows)
        self._fetches.append(RowFetch(item.key, rows, item.num_rows, item.options, item.data, request_id))
        return True

    def _images_from(self, request: Request, start: int) -> Iterator[tuple[int, ImageItem, RowRange]]:
        """Yields (index, image, rows) for each image with rows that the tokens from `start` on take."""
        for index in range(self._progress[request.request_id].num_passed, len(request.prompt.images)):
            item = request.prompt.images[index]
            first, last = item.rows_between(start, item.span.stop)
            if first < last:
                yield index, item, RowRange(first, last)

    def _note_source(self, request: Request, item: ImageItem, rows: RowRange) -> None:
        is_resident = self._cache.first_missing_row(item.key, rows) is None
        sources = self._progress[request.request_id].sources
        sources.setdefault(item.key, RowSource.DEVICE if is_resident else None)

    def _account(self, request: Request, progress: _ImageProgress, index: int) -> None:
        """Adds the rows that an image needed to the request's usage, by their source."""
        item = request.prompt.images[index]
        num_rows = item.num_rows - progress.num_skipped_rows[index]
        if num_rows == 0:
            return
        source = progress.sources.get(item.key) or self._cache.source(item.key)
        if source is RowSource.ENCODED:
            request.usage.encoded_image_tokens += num_rows
            # The same image again in this prompt is served by the first one's rows.
            progress.sources[item.key] = RowSource.DEVICE
        else:
            request.usage.cached_image_tokens += num_rows
