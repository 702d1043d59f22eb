"""Bounds the rows that ReadEmbedding streams hold in memory until their readers took them, and shares it among tenants.

A reader that takes no chunks keeps its rows alive. Rows from the shared cache are a copy for each stream. Those of the
local cache are one buffer for all streams, so it counts once per tenant, however many streams send it.

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
