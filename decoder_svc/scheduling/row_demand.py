"""The embedding rows that each live request still needs, and the fetches of those that are missing.

The scheduler decides which request may ask for rows and when. The EncoderCacheManager decides whether there is room.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from decoder_svc.scheduling.encoder_cache_manager import EncoderCacheManager, RowUser, row_user
from decoder_svc.scheduling.prompt import ImageItem
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.row_range import RowRange
from decoder_svc.scheduling.scheduler_output import RowFetch
from lookonce.content_key import ContentKey
from lookonce.uncounted_rows import UncountedRows


@dataclass(slots=True)
class _ImageProgress:
    """The images of one request: how far its computed tokens have passed them, and how their rows were counted."""

    # Rows of each image whose tokens were in the prefix cache when the request was first admitted.
    num_skipped_rows: list[int]
    # Rows of each image that the request's usage counts as encoded.
    num_encoded_rows: list[int]
    # Images before this index are computed to their last token.
    num_passed: int = 0
    # Images before this index are counted in the request's usage. A recomputation after preemption counts none again.
    num_accounted: int = 0


class RowDemand:
    """Tracks the rows that live requests need, asks for missing ones, and releases rows whose tokens are computed."""

    def __init__(
        self, encoder_cache: EncoderCacheManager, max_num_rows_asked: int, *, overlap_encode: bool = True
    ) -> None:
        """`max_num_rows_asked` bounds the rows requested in one step, except that one larger image is still requested.

        With `overlap_encode` False a request computes nothing while any of its rows is in flight.
        """
        self._cache = encoder_cache
        self._overlap_encode = overlap_encode
        self._max_num_rows_asked = max_num_rows_asked
        self._progress: dict[RequestId, _ImageProgress] = {}
        # Rows that encoders computed for this decoder and that no request's usage counts.
        self._uncounted = UncountedRows()
        # Rows that the current step may still ask for.
        self._row_budget = max_num_rows_asked
        self._fetches: list[RowFetch] = []
        # The request that is served first found no room for its rows: no request behind it may take any in this step.
        self._is_short = False
        self._has_deferred = False

    def begin_step(self) -> None:
        """Starts a step with a full row budget and an empty list of fetches."""
        self._row_budget = self._max_num_rows_asked
        self._fetches = []
        self._is_short = False
        self._has_deferred = False

    @property
    def fetches(self) -> tuple[RowFetch, ...]:
        """The fetches that this step has asked for."""
        return tuple(self._fetches)

    @property
    def has_deferred(self) -> bool:
        """Whether this step refused rows that a later step may grant: its budget was spent, or room was reserved."""
        return self._has_deferred

    def add(self, request: Request) -> None:
        """Starts tracking the images of a request, which has no computed tokens yet."""
        num_images = len(request.prompt.images)
        self._progress[request.request_id] = _ImageProgress([0] * num_images, [0] * num_images)

    def remove(self, request: Request) -> None:
        """Releases the rows of a request that ended, and stops tracking it."""
        self._give_back_counts(request)
        self._release(request)
        del self._progress[request.request_id]

    def restart(self, request: Request) -> None:
        """Releases the rows of a preempted request, which is computed again from its first token."""
        if request.num_unknown_tokens == 0:
            # Otherwise the step in flight gives it its first output.
            self._give_back_counts(request)
        self._release(request)
        self._progress[request.request_id].num_passed = 0

    def ask(self, request: Request, start: int, least: int, *, is_first: bool, may_displace: bool) -> None:
        """Asks for the rows of the request's tokens from `start` on that are neither resident nor in flight.

        Args:
            least: The smallest number of tokens that the request can compute next. Only for the rows of these tokens
                may the request evict rows that requests behind it need.
            is_first: Whether no request is served before this one that could take the room that it waits for. True
                for the head of the waiting queue and for every running request.
            may_displace: Whether the request may evict rows that requests behind it need.
        """
        if self.has_passed_images(request):
            return
        self._release_before(request, start)
        for index, item, rows in self._images_from(request, start):
            user = row_user(request, index)
            self._cache.need(item.key, user, rows)
            is_first_missing = item.token_of_row(rows.start) < start + least
            displacing = user if is_first_missing and may_displace else None
            for part in self._cache.unasked(item.key, rows):
                if not self._reserve(item, part, displacing, request):
                    self._is_short |= is_first_missing and is_first
                    return

    def arrived(self, key: ContentKey, rows: RowRange, num_encoded_rows: int) -> bool:
        """Marks rows as resident. Returns False if they are no longer expected.

        `num_encoded_rows`: rows of the image that an encoder computed for this fetch. They count even if nobody expects
        the fetched ones.
        """
        self._uncounted.add(key.value, num_encoded_rows)
        return self._cache.arrived(key, rows)

    def runnable_stop(self, request: Request, start: int) -> int:
        """Returns one past the last token from `start` on that can be computed with the rows now on the device."""
        if self.has_passed_images(request):
            return request.num_tokens
        if not self._overlap_encode and self._is_any_arriving(request, start):
            return start
        for _, item, rows in self._images_from(request, start):
            missing = self._cache.first_missing_row(item.key, rows)
            if missing is not None:
                return item.token_of_row(missing)
        return request.num_tokens

    def has_passed_images(self, request: Request) -> bool:
        """Whether the request is past its last image, as most are in most steps: they decode, or are about text."""
        return self._progress[request.request_id].num_passed == len(request.prompt.images)

    def has_asked_for_all(self, request: Request, start: int) -> bool:
        """Whether every row of the request's tokens from `start` on is resident or in flight."""
        return not any(self._cache.unasked(item.key, rows) for _, item, rows in self._images_from(request, start))

    def renew(self, request: Request) -> None:
        """Restates the rows that the request needs, because its place in the serving order has changed."""
        for index, item, rows in self._images_from(request, request.num_computed_tokens):
            self._cache.need(item.key, row_user(request, index), rows)

    def account_for_hit(self, request: Request, num_tokens: int) -> None:
        """Counts rows of tokens up to `num_tokens` as skipped: the prefix cache has these tokens."""
        for index, item in enumerate(request.prompt.images):
            first, last = item.rows_between(request.num_computed_tokens, num_tokens)
            self._progress[request.request_id].num_skipped_rows[index] += last - first
            request.usage.skipped_image_tokens += last - first

    def pass_computed(self, request: Request) -> None:
        """Releases every image whose tokens are all computed, and counts its rows in the usage once."""
        images = request.prompt.images
        progress = self._progress[request.request_id]
        while progress.num_passed < len(images):
            index, item = progress.num_passed, images[progress.num_passed]
            if item.span.stop > request.num_computed_tokens:
                return
            progress.num_passed += 1
            self._account(request, progress, index)
            self._cache.release(item.key, request.request_id, index)

    def takes_any(self, request: Request, key: ContentKey, rows: RowRange, *, had_data: bool) -> bool:
        """Whether the request cannot continue without these rows, which failed to arrive.

        A fetch without the image's bytes fails only requests that have no bytes either; the others ask again.
        """
        return any(
            item.key == key
            and (had_data or item.data is None)
            and needed.start < rows.stop
            and rows.start < needed.stop
            for _, item, needed in self._images_from(request, request.num_computed_tokens)
        )

    def _release_before(self, request: Request, start: int) -> None:
        """Releases images of which no token from `start` on takes a row.

        A waiting request claims rows before another request computes the same tokens. Nobody may evict rows that the
        head of the queue claims, the head neither: if it kept claims that it no longer needs, it could wait for itself.
        """
        for index in range(self._progress[request.request_id].num_passed, len(request.prompt.images)):
            item = request.prompt.images[index]
            first, last = item.rows_between(start, item.span.stop)
            if first < last:
                return
            self._cache.release(item.key, request.request_id, index)

    def _release(self, request: Request) -> None:
        for index, item in enumerate(request.prompt.images):
            self._cache.release(item.key, request.request_id, index)

    def _is_any_arriving(self, request: Request, start: int) -> bool:
        return any(self._cache.is_any_arriving(item.key, rows) for _, item, rows in self._images_from(request, start))

    def _reserve(self, item: ImageItem, rows: RowRange, displacing: RowUser | None, request: Request) -> bool:
        """Reserves room for rows and adds their fetch to the step. Returns False if budget or room is short."""
        if self._is_short or (self._fetches and len(rows) > self._row_budget):
            self._has_deferred = True
            return False
        if not self._cache.can_reserve(len(rows), displacing):
            return False
        self._cache.reserve(item.key, rows, displacing)
        self._row_budget -= len(rows)
        token = request.prompt.removal_token
        num_rows = item.num_rows + item.num_unused_rows
        self._fetches.append(RowFetch(item.key, rows, num_rows, item.options, item.data, request.request_id, token))
        return True

    def _images_from(self, request: Request, start: int) -> Iterator[tuple[int, ImageItem, RowRange]]:
        """Yields (index, image, rows) for each image with rows that the tokens from `start` on take."""
        for index in range(self._progress[request.request_id].num_passed, len(request.prompt.images)):
            item = request.prompt.images[index]
            first, last = item.rows_between(start, item.span.stop)
            if first < last:
                yield index, item, RowRange(first, last)

    def _account(self, request: Request, progress: _ImageProgress, index: int) -> None:
        """Counts the rows of an image whose tokens are computed, and takes over the count of its encode if it is open.

        The first request that needs any of the rows takes it; all others, and the same image again in this prompt, find
        rows that are there. After a preemption, the request may take the count of an encode that came since.
        """
        item = request.prompt.images[index]
        num_needed = item.num_rows - progress.num_skipped_rows[index]
        if index >= progress.num_accounted:
            progress.num_accounted = index + 1
            request.usage.cached_image_tokens += num_needed
        if num_needed > 0:
            at_most = item.num_rows - progress.num_encoded_rows[index]
            # Rows that no prompt shows would stay uncounted.
            taken = self._uncounted.take(item.key.value, at_most + item.num_unused_rows)
            self._count_as_encoded(request, progress, index, min(at_most, taken))

    def _count_as_encoded(self, request: Request, progress: _ImageProgress, index: int, num_rows: int) -> None:
        """Counts `num_rows` more of an image's rows as encoded; a negative number takes a count back.

        An encode computes all rows of an image. If the prefix cache had the tokens of some, they count as encoded too.
        """
        num_image_rows = request.prompt.images[index].num_rows
        num_needed = num_image_rows - progress.num_skipped_rows[index]
        num_before = progress.num_encoded_rows[index]
        progress.num_encoded_rows[index] += num_rows
        num_cached = max(0, num_needed - num_before - num_rows) - max(0, num_needed - num_before)
        request.usage.encoded_image_tokens += num_rows
        request.usage.cached_image_tokens += num_cached
        request.usage.skipped_image_tokens -= num_rows + num_cached

    def _give_back_counts(self, request: Request) -> None:
        """Reopens the counts of a request without output: if its caller leaves, nobody sees its usage."""
        if request.num_output_tokens > 0:
            return
        progress = self._progress[request.request_id]
        for index, num_rows in enumerate(progress.num_encoded_rows):
            if num_rows > 0:
                self._uncounted.add(request.prompt.images[index].key.value, num_rows)
                self._count_as_encoded(request, progress, index, -num_rows)
