"""Encodes in progress, and whether operators removed their images meanwhile. The rows of such an encode are not kept.

A removal reaches an encode in two ways. Its message marks the encodes of this process, here. And the removal revokes
the leases of encodes in Redis, which also holds back a replica that has not heard the message (entry_writer.py).

An encode without a lease, or that got it late, needs to be sure of the messages when it stores its rows: the token in
Redis is either that of the last message that was heard, or the same as when the encode began. The write follows within
`settle_s`, and a removal looks for entries once more after so long (cache_control.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from lookonce.content_key import ContentKey
from lookonce.forgotten import Forgotten
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.store.forget_channel import token_in

# Number of looks for the message of a removal in the process that sent it, and seconds between two of them.
_NUM_LOOKS = 200
_LOOK_S = 0.005


class ForgetWatch(Protocol):
    """A subscription to operators' removals of images; see lookonce/store/forget_channel.py."""

    @property
    def last_token(self) -> bytes | None:
        """Token of the last message, empty where there never was one; None while messages may be missed."""
        ...

    @property
    def heard_token(self) -> bytes | None:
        """Token of the last message that was heard, also while messages may be missed; None if nothing is known."""
        ...

    def has_heard(self, token: bytes) -> bool:
        """Returns whether the message with this token was heard, also if later ones were."""
        ...

    def removed_since(self, token: bytes, key: bytes, file_tags: Sequence[bytes]) -> bool:
        """Returns whether an image was removed after the message with this token; True where that is not known."""
        ...


@dataclass(slots=True, eq=False)
class EncodeInProgress:
    """One encode, from the look into the shared cache until its rows are stored."""

    key: ContentKey
    file_tags: tuple[bytes, ...]
    # Token of the last removal before it, as far as it was known; None where it was not.
    token: bytes | None
    began_s: float = field(default_factory=time.monotonic)
    # Proof of the encode lease under which the rows are stored; empty without one.
    lease_token: bytes = b""
    # Whether an operator has removed the image since it arrived. Set on the event loop, read in threads, too.
    is_forgotten: bool = False


class Removals:
    """The removals that concern encodes in progress. Event loop only, apart from `are_known_to`."""

    def __init__(self, watch: ForgetWatch | None, settle_s: float) -> None:
        """`watch` None: no operator can remove images.

        `settle_s`: time that a removal waits before it revokes leases and looks for entries once more, seconds.
        """
        self.watch = watch
        self._settle_s = settle_s
        # By ContentKey.value. A refresh may run beside another encode of its image.
        self._in_progress: dict[bytes, set[EncodeInProgress]] = {}

    @property
    def heard_token(self) -> bytes | None:
        """Token of the last removal that this process heard of, if known. Take it when an image arrives."""
        return None if self.watch is None else self.watch.heard_token

    async def heard(self, token: bytes) -> None:
        """Waits until this process has heard of the removal with this token, for a second at most.

        An image that arrives earlier counts as one that came before the removal, so its rows are not kept.
        """
        for _ in range(_NUM_LOOKS):
            if self.watch is None or self.watch.has_heard(token):
                return
            await asyncio.sleep(_LOOK_S)

    @contextmanager
    def noticed(
        self, key: ContentKey, file_tags: tuple[bytes, ...], arrival_token: bytes | None
    ) -> Iterator[EncodeInProgress]:
        """Marks the encode of the block as forgotten if its image was or is removed since it arrived.

        `arrival_token` is the one of the last removal that was heard of before the image arrived here, or in the
        decoder that passes it on; None if it is not known.
        """
        encode = EncodeInProgress(key, file_tags, b"" if self.watch is None else self.watch.last_token)
        if self.watch is not None and arrival_token is not None:
            encode.is_forgotten = self.watch.removed_since(arrival_token, key.value, file_tags)
        encodes = self._in_progress.setdefault(key.value, set())
        encodes.add(encode)
        try:
            yield encode
        finally:
            encodes.discard(encode)
            if not encodes and self._in_progress.get(key.value) is encodes:
                del self._in_progress[key.value]

    def forget(self, forgotten: Forgotten) -> None:
        """Marks the encodes in progress of images that were removed."""
        for encodes in self._in_progress.values():
            for encode in encodes:
                encode.is_forgotten |= forgotten.includes(encode.key.value, encode.file_tags)

    def is_forgotten(self, key: ContentKey) -> bool:
        """Whether an encode of this image is in progress that began before the image was removed."""
        return any(encode.is_forgotten for encode in self._in_progress.get(key.value, ()))

    def hold(self, encode: EncodeInProgress, lease_token: bytes) -> None:
        """Notes the lease of an encode, so that a removal can revoke it. A lease that comes too late is not noted."""
        if time.monotonic() - encode.began_s <= self._settle_s:
            encode.lease_token = lease_token

    def are_known_to(self, encode: EncodeInProgress, store: EmbeddingStore) -> bool:
        """Whether this process has heard of all removals since the encode began. Asks Redis, so call it in a thread."""
        if self.watch is None:
            return True
        token = token_in(store)
        return token is not None and token in (encode.token, self.watch.last_token)
