"""The places for images between admission and the end of their forward pass, and their division among tenants.

Places are bounded in number and in bytes of files. While there is room, every tenant gets it, so one tenant alone can
use all. When there is none, a tenant takes room from the tenant with the most, as long as that one then still has at
least as much: its newest image that only waits is refused. Tenants that compete thus come to equal shares, and none can
shut another one out. Within a tenant, the image that comes last is refused.

This is longest queue drop (Suter, Lakshman, Stiliadis and Choudhury, INFOCOM 1998). A fixed share for each tenant would
either leave places empty, or not be free at the moment when another tenant's first image comes.

Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from encoder_svc.cache.single_flight import Flight
from lookonce.errors import OverloadedError

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """One image in the queue."""

    tenant: str
    num_bytes: int
    flight: Flight


class QueuePlaces:
    """Places for images. Its length is the number of those that are taken."""

    def __init__(self, max_images: int, max_bytes: int) -> None:
        """`max_bytes` bounds the files of all images together. An image that is alone is admitted whatever its size."""
        self._max_images = max_images
        self._max_bytes = max_bytes
        # By tenant, only those with images; of each, the image that was admitted first comes first.
        self._places: dict[str, list[_Place]] = {}
        self._num_images = self._num_bytes = 0

    def __len__(self) -> int:
        return self._num_images

    @property
    def num_bytes(self) -> int:
        """Size of the files of all images that have places."""
        return self._num_bytes

    @contextmanager
    def taken(self, tenant: str, num_bytes: int, flight: Flight) -> Iterator[None]:
        """Holds a place for a tenant's image of `num_bytes` while the block runs.

        `flight` may be dropped meanwhile, with OverloadedError for its callers. Raises OverloadedError when there is no
        room and the tenant may take none from another one.
        """
        place = _Place(tenant, num_bytes, flight)
        self._make_room_for(place)
        self._places.setdefault(tenant, []).append(place)
        self._num_images += 1
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._give_back(place)

    def _make_room_for(self, new: _Place) -> None:
        while self._num_images >= self._max_images:
            if not self._push_out_for(new, lambda _: 1, f"places for {self._max_images} images are"):
                raise OverloadedError(
                    f"{self._num_images} images wait for the model, which is the limit; try again later"
                )
        limit = f"{self._max_bytes // _MIB} MiB for files of images"
        while self._num_images and self._num_bytes + new.num_bytes > self._max_bytes:
            if not self._push_out_for(new, lambda place: place.num_bytes, f"{limit} are"):
                raise OverloadedError(f"images that wait for the model use the {limit}; try again later")

    def _push_out_for(self, new: _Place, size_of: Callable[[_Place], int], limit: str) -> bool:
        """Drops an image of a tenant that then still has as much as the tenant of `new`. Returns whether there was one.

        `size_of` measures places; `limit` names what is used up.
        """
        sizes = {tenant: sum(map(size_of, places)) for tenant, places in self._places.items()}
        least = sizes.get(new.tenant, 0) + size_of(new)
        for tenant in sorted(sizes, key=lambda one: sizes[one], reverse=True):
            for place in reversed(self._places[tenant]):
                remaining = sizes[tenant] - size_of(place)
                if remaining >= least and place.flight.drop(_pushed_out(limit)):
                    self._give_back(place)
                    return True
        return False

    def _give_back(self, place: _Place) -> None:
        """Frees a place if it is still taken: that of a dropped image is free before its task has ended."""
        places = self._places.get(place.tenant, [])
        if place in places:
            places.remove(place)
            self._num_images -= 1
            self._num_bytes -= place.num_bytes
            if not places:
                del self._places[place.tenant]


def _pushed_out(limit: str) -> OverloadedError:
    return OverloadedError(
        f"all {limit} taken, most of them by your tenant, and another tenant needs some; try again later, or send less "
        "at once"
    )
