"""Rows that an encoder has computed and that no answer has counted yet.

Several requests may wait for one encode, and the request that began it may end before it is counted. Each side keeps
its open counts here until one request takes them: the first that takes an image's rows counts them, so none counts
them again.
"""

from __future__ import annotations

from collections import OrderedDict

# Images whose requests all left before the count. When there are more, the oldest counts are lost.
_MAX_IMAGES = 16_384


class UncountedRows:
    """Numbers of rows by the `ContentKey.value` of their image. For a single thread."""

    def __init__(self, max_images: int = _MAX_IMAGES) -> None:
        """With more than `max_images` images, the oldest number is dropped."""
        self._max_images = max_images
        # The oldest comes first.
        self._num_rows: OrderedDict[bytes, int] = OrderedDict()

    @property
    def num_rows(self) -> int:
        """Number of rows that are not counted yet, over all images."""
        return sum(self._num_rows.values())

    def add(self, key: bytes, num_rows: int) -> None:
        """Adds rows of an image that are not counted yet."""
        if num_rows > 0:
            self._num_rows[key] = self._num_rows.get(key, 0) + num_rows
            if len(self._num_rows) > self._max_images:
                self._num_rows.popitem(last=False)

    def take(self, key: bytes, at_most: int | None = None) -> int:
        """Removes up to `at_most` rows of an image (None: all) and returns their number: the caller counts them."""
        present = self._num_rows.pop(key, 0)
        taken = present if at_most is None else min(present, at_most)
        if taken < present:
            self._num_rows[key] = present - taken
        return taken
