"""Bounds the images of all calls in progress, in number and in bytes of their files, and shares both among tenants.

Every image of a call counts, from the call's admission to its answer: also one that waits to be hashed, that joined the
encode of another call, or that is given by digest only. One call of 3 kB may name 64 images.

A tenant gets as much as is free: it is refused what would give it more than nobody has. One tenant alone thus gets half
of everything, k tenants get 1/(k+1) each, and something is always free for a tenant that comes. These are dynamic
thresholds (Choudhury and Hahne, Dynamic Queue Length Thresholds for Shared-Memory Packet Switches, IEEE/ACM
Transactions on Networking 1998).

Event loop only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lookonce.errors import InvalidInputError, OverloadedError

# Each image costs the event loop up to 0.7 ms (2 x AMD EPYC, 2026-11-23).
MAX_IMAGES = 8192
_MIB = 1 << 20


class ImageShares:
    """Counts what the calls in progress of each tenant have taken."""

    def __init__(self, max_bytes: int, max_images: int = MAX_IMAGES) -> None:
        self._images = _Share(max_images)
        self._bytes = _Share(max_bytes)

    @property
    def num_bytes(self) -> int:
        """Size of the files of all images in progress."""
        return self._bytes.used

    @contextmanager
    def taken(self, tenant: str, num_images: int, num_bytes: int) -> Iterator[None]:
        """Holds the share of some images while the block runs.

        Raises OverloadedError if the tenant has too much, and InvalidInputError for what would never fit.
        """
        if num_bytes > self._bytes.limit:
            raise InvalidInputError(
                f"this call needs {_mib(num_bytes)}, and all calls together may have {_mib(self._bytes.limit)} "
                "(max_queued_bytes)"
            )
        if not self._images.has_room(tenant, num_images):
            raise OverloadedError(
                f"your calls in progress have {self._images.of(tenant)} images, and this one has {num_images}; try "
                "again later, or send fewer at once"
            )
        if not self._bytes.has_room(tenant, num_bytes):
            raise OverloadedError(
                f"your calls in progress have {_mib(self._bytes.of(tenant))}, this one needs {_mib(num_bytes)}, and "
                f"{_mib(self._bytes.limit - self._bytes.used)} are free (max_queued_bytes); try again later, or send "
                "less at once"
            )
        self._images.add(tenant, num_images)
        self._bytes.add(tenant, num_bytes)
        try:
            yield
        finally:
            self._images.add(tenant, -num_images)
            self._bytes.add(tenant, -num_bytes)


class _Share:
    """One limit, and how much of it each tenant uses."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        # Only those that use something.
        self._tenants: dict[str, int] = {}

    def of(self, tenant: str) -> int:
        return self._tenants.get(tenant, 0)

    def has_room(self, tenant: str, amount: int) -> bool:
        return amount == 0 or self.of(tenant) + amount <= self.limit - self.used

    def add(self, tenant: str, amount: int) -> None:
        self.used += amount
        left = self.of(tenant) + amount
        if left:
            self._tenants[tenant] = left
        else:
            self._tenants.pop(tenant, None)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.1f} MiB"
