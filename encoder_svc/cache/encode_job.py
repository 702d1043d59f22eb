"""The types that travel with an image through the encoder: request, job and outcome. Data only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from lookonce.content_key import ContentKey, ImageDigest, ProcessorOptions
from lookonce.embedding_meta import EmbeddingMeta
from lookonce.image_file import ImageFile
from lookonce.turns.caller_order import Turn
from lookonce.turns.fair_queue import CallerId


class CachePolicy(enum.Enum):
    """The use that a request makes of the caches."""

    READ_AND_WRITE = "read_and_write"
    # Encode again and overwrite the cached rows.
    REFRESH = "refresh"
    # Never encode.
    ONLY_IF_CACHED = "only_if_cached"


class Origin(enum.Enum):
    """The place a result came from."""

    COMPUTED = "computed"
    COALESCED = "coalesced"
    LOCAL_CACHE = "local_cache"
    SHARED_CACHE = "shared_cache"


@dataclass(frozen=True, slots=True)
class ImageInput:
    """One image of a request. At least one of `data` and `digest` is set."""

    # The original file, or a pair of video frames; None for a reference by digest.
    data: ImageFile | None = field(repr=False)
    # With `data`: the digest that the file must have. Without: the image that is meant.
    digest: ImageDigest | None
    options: ProcessorOptions
    # Token of the last removal that was heard of when the image arrived, here or in a decoder; None: it arrives now.
    removal_token: bytes | None = None


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One image to be encoded unless a cache has its rows. Carries everything that later steps need."""

    # Tells image, options, tenant and encoder apart.
    key: ContentKey
    # The original file, or a pair of video frames.
    data: ImageFile = field(repr=False)
    # `file_tag` of each of its files.
    file_tags: tuple[bytes, ...] = field(repr=False)
    # Checked against the model.
    options: ProcessorOptions
    cache_policy: CachePolicy
    # Token of the last removal that was heard of before the image arrived; None if it is not known.
    arrival_token: bytes | None
    # Position among all images asked for, and the order within its caller.
    turn: Turn[CallerId]

    @property
    def refresh(self) -> bool:
        """Whether cached rows are to be ignored and overwritten."""
        return self.cache_policy is CachePolicy.REFRESH


@dataclass(frozen=True, slots=True)
class EncodeOutcome:
    """The result for one image. Its rows are read by key, unless it has them."""

    key: ContentKey
    meta: EmbeddingMeta
    origin: Origin
    # Duration of the forward pass, seconds; 0 for a hit.
    compute_s: float
    # Whether the shared cache holds the rows.
    stored: bool
    # All rows, if the shared cache does not have them: an operator removed the image, or a copy could not be stored.
    rows: memoryview | None = field(default=None, repr=False)
