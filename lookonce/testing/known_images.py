"""The images that a FakeServer knows."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from lookonce.content_key import ImageDigest
from lookonce.errors import EmbeddingNotCachedError
from lookonce.images import ImageRef


class KnownImages:
    """Digests of images whose bytes were sent. Thread-safe."""

    def __init__(self, rows_per_image: int) -> None:
        self.rows_per_image = rows_per_image
        self._digests: set[ImageDigest] = set()
        self._uploads: list[ImageRef] = []
        self._lock = threading.Lock()

    @property
    def uploads(self) -> list[ImageRef]:
        """The images that came as bytes, in order; one that came twice is there twice."""
        with self._lock:
            return list(self._uploads)

    def forget(self) -> None:
        """Makes all images unknown, as after an eviction."""
        with self._lock:
            self._digests.clear()

    def __contains__(self, digest: object) -> bool:
        with self._lock:
            return digest in self._digests

    def shown(self, images: Sequence[ImageRef]) -> int:
        """Takes the images of one request. Returns how many of them were new.

        Raises EmbeddingNotCachedError if some are given by digest and unknown. Otherwise all are known from then on.
        """
        with self._lock:
            sent = [image for image in images if image.data is not None]
            self._uploads += sent
            known = self._digests | {image.digest for image in sent}
            missing = [index for index, image in enumerate(images) if image.digest not in known]
            if missing:
                raise EmbeddingNotCachedError("no rows are cached for this digest", indexes=missing)
            num_new = len(known) - len(self._digests)
            self._digests = known
            return num_new
