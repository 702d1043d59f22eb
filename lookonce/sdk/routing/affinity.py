"""The property by which requests are routed: their first image, or the beginning of their text.

Requests that begin alike have the same affinity, so they meet at the replica that has their rows, keys and values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from lookonce import tracing
from lookonce.identity import AFFINITY_KEY

# Long documents with a question at their end have the same affinity.
_MAX_TEXT_CHARACTERS = 4096
_NUM_BYTES = 16


def affinity_of(digest: bytes | None, texts: Iterable[str]) -> bytes:
    """Returns 16 bytes: of the first image's digest, or without images, a digest of the first texts."""
    if digest is not None:
        return digest[:_NUM_BYTES]
    hasher = hashlib.sha256()
    num_left = _MAX_TEXT_CHARACTERS
    for text in texts:
        hasher.update(text[:num_left].encode(errors="surrogatepass"))
        num_left -= len(text)
        if num_left <= 0:
            break
    return hasher.digest()[:_NUM_BYTES]


def with_affinity(metadata: tracing.Metadata, affinity: bytes) -> tracing.Metadata:
    """Returns metadata that tells proxies the affinity of a request, in hexadecimal digits."""
    return (*metadata, (AFFINITY_KEY, affinity.hex()))
