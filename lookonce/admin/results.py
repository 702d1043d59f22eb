"""The results of operators' calls. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from lookonce.images import ImageRef


@dataclass(frozen=True, slots=True)
class EvictedImage:
    """One image after its removal: no cache has rows of it any more."""

    image: ImageRef
    # Entries of the image that the shared cache had: one for each encoder and set of options.
    entries: int
    # Pairs of video frames with the image, and single frames, that the shared cache had.
    pairs: int

    @property
    def found(self) -> bool:
        """Whether the shared cache had any rows of the image before."""
        return self.entries + self.pairs > 0


@dataclass(frozen=True, slots=True)
class EntryStats:
    """The state of one image's rows, with the options of its reference, in both caches."""

    image: ImageRef
    # Whether the shared cache has the rows.
    cached: bool
    # Whether the process of the encoder that answered has them.
    cached_locally: bool
    # Size in the shared cache with the header, bytes; 0 if it is not cached.
    size_bytes: int
    # Seconds until the entry expires. None: pinned, or not cached.
    ttl_s: float | None
    pinned: bool
    # Redis' logarithmic count of recent uses, 0 to 255. None: the server keeps no count.
    frequency: int | None


@dataclass(frozen=True, slots=True)
class TierStats:
    """The size and the counters of one cache, in this process or in Redis."""

    entries: int
    size_bytes: int
    # 0: no limit, or not known.
    capacity_bytes: int
    # Since the start of the encoder that answered.
    hits: int
    misses: int
    # Since the start of the encoder that answered, or of Redis.
    evictions: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters of the cache in the process of the encoder that answered, and of the shared cache."""

    local: TierStats
    shared: TierStats
