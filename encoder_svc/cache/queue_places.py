"""The places for images between admission and the end of their forward pass, and their division among tenants.

While places are free, every tenant gets them, so one tenant alone can use all. When none is free, a tenant takes one
from the tenant with the most, if that one then still has at least as many: its newest image that only waits is refused.
Tenants that compete thus come to equal numbers, and none can shut another one out. Within a tenant, the image that
comes last is refused.

This is longest queue drop (Suter, Lakshman, Stiliadis and Choudhury, INFOCOM 1998). A fixed share for each tenant would
either leave places empty, or not be free at the moment when another tenant's first image comes.

Event loop only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from encoder_svc.cache.single_flight import Flight
from lookonce.errors import OverloadedError


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """One image in the queue."""

    tenant: str
    flight: Flight


class QueuePlaces:
    """A bounded number of places for images. Its length is the number of those that are taken."""

    def __init__(self, max_images: int) -> None:
        self._max_images = max_images
        # By tenant, only those with images; of each, the image that was admitted first comes first.
        self._places: dict[str, list[_Place]] = {}
        self._num_images = 0

    def __len__(self) -> int:
        return self._num_images

    @contextmanager
    def taken(self, tenant: str, flight: Flight) -> Iterator[None]:
        """Holds a place for a tenant's image while the block runs.

        `flight` may be dropped meanwhile, with OverloadedError for its callers. Raises OverloadedError when all places
        are taken and the tenant may take none from another one.
        """
        if self._num_images >= self._max_images and not self._push_out_for(tenant):
            raise OverloadedError(f"{self._num_images} images wait for the model, which is the limit; try again later")
        place = _Place(tenant, flight)
        self._places.setdefault(tenant, []).append(place)
        self._num_images += 1
        try:
            yield
        finally:
            self._give_back(place)

    def _push_out_for(self, tenant: str) -> bool:
        """Drops an image of a tenant that has at least two images more than `tenant`. Returns whether there was one."""
        num_own = len(self._places.get(tenant, ()))
        richer = [places for places in self._places.values() if len(places) > num_own + 1]
        for places in sorted(richer, key=len, reverse=True):
            for place in reversed(places):
                if place.flight.drop(_pushed_out(len(places), self._max_images)):
                    self._give_back(place)
                    return True
        return False

    def _give_back(self, place: _Place) -> None:
        """Frees a place if it is still taken: that of a dropped image is free before its task has ended."""
        places = self._places.get(place.tenant, [])
        if place in places:
            places.remove(place)
            self._num_images -= 1
            if not places:
                del self._places[place.tenant]


def _pushed_out(num_images: int, max_images: int) -> OverloadedError:
    return OverloadedError(
        f"all places for {max_images} images are taken, {num_images} of them by your tenant, and another tenant needs "
        "one; try again later, or send less at once"
    )
