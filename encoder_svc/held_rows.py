"""Bounds the rows that answers hold in memory until their readers took them, and shares the bound among tenants.

A reader that takes nothing keeps the rows of its call alive. `ReadEmbedding` streams send rows from a buffer: those of
the shared cache are a copy for each stream. Those of the local cache are one buffer for all streams, so it counts once
per tenant, however many streams send it. Answers of `Encode` and `EncodeStream` hold copies, which count each.

Rows are taken when gRPC has written the answer to the connection, as far as the reader's flow control lets it. Up to 64
KiB may then still be with gRPC, and more in the buffers of the operating system. While an answer waits, gRPC has a
second copy of it as a message; only one is counted.

Event loop only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from lookonce.server.admission.image_shares import ImageShares


@dataclass(slots=True)
class _HeldBuffer:
    """A buffer that counts for a tenant while streams send it."""

    share: ExitStack
    num_streams: int = 0


class HeldRows:
    """Counts the rows that each tenant's streams hold."""

    def __init__(self, max_bytes: int) -> None:
        self._shares = ImageShares(max_bytes)
        # By tenant and identity of the buffer, which cannot change while a stream holds the buffer.
        self._buffers: dict[tuple[str, int], _HeldBuffer] = {}

    @property
    def num_bytes(self) -> int:
        """Size of all rows that are held."""
        return self._shares.num_bytes

    @contextmanager
    def held(self, tenant: str, rows: memoryview) -> Iterator[None]:
        """Counts the whole buffer behind `rows` while the block runs.

        The tenant is the one that is called for: rows that decoders read for one tenant take nothing from another.
        Raises OverloadedError if the tenant has too much.
        """
        name = (tenant, id(rows.obj))
        buffer = self._buffers.get(name)
        if buffer is None:
            share = ExitStack()
            share.enter_context(self._shares.taken(tenant, 1, memoryview(rows.obj).nbytes))
            buffer = self._buffers[name] = _HeldBuffer(share)
        buffer.num_streams += 1
        try:
            yield
        finally:
            buffer.num_streams -= 1
            if not buffer.num_streams:
                del self._buffers[name]
                buffer.share.close()

    @contextmanager
    def copies(self, tenant: str) -> Iterator[RowCopies]:
        """Counts the copies of rows in the answers of one call. The end of the block gives back those that are left."""
        copies = RowCopies(self._shares, tenant)
        try:
            yield copies
        finally:
            copies.close()


class RowCopies:
    """The copies of rows that the answers of one call hold."""

    def __init__(self, shares: ImageShares, tenant: str) -> None:
        self._shares = shares
        self._tenant = tenant
        # By size, as copies of one size are alike.
        self._held: dict[int, list[ExitStack]] = {}

    def take(self, num_bytes: int) -> None:
        """Counts a copy. Raises OverloadedError if the tenant has too much."""
        share = ExitStack()
        share.enter_context(self._shares.taken(self._tenant, 1, num_bytes))
        self._held.setdefault(num_bytes, []).append(share)

    def give_back(self, num_bytes: int) -> None:
        """Ends the count of one copy of this size."""
        self._held[num_bytes].pop().close()

    def close(self) -> None:
        """Ends the count of all copies."""
        for shares in self._held.values():
            for share in shares:
                share.close()
        self._held.clear()
