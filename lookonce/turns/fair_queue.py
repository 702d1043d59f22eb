"""The queue for waiting work: callers take turns, and each caller's items leave in the order of asking.

Both services let work wait, each for something else: the encoder's `images/file_readers.py` for a thread that reads
files, its `images/pixel_budget.py` for a decoding process and for memory, its `vision/forward_queue.py` for a forward
pass. The last one keeps the images of each tenant in a FairQueue; the others use `cost_turns.py`, which has one for
each tenant and range of costs. In the encoder, the numbers by which it orders come from `caller_order.py`, which is no
queue: it gives each image its number when it is asked for, and lets an image that is ready early wait a moment for the
earlier ones of its caller.

No thread, no clock; not safe for threads.
"""

from __future__ import annotations

import bisect
import operator
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar


class CallerId(NamedTuple):
    """The call that an item belongs to. Items of one caller take turns with those of others.

    Clients choose request ids, so the calls of two tenants may have the same one.
    """

    # `Tenant.tag` of the call's tenant.
    tenant: str
    # A decoder passes its own id on, so all images of one prompt have the same caller.
    request_id: str


ItemT = TypeVar("ItemT")

# The first field of an entry of a line.
_number = operator.itemgetter(0)


class FairQueue(Generic[ItemT]):
    """Waiting items by caller. Callers are served in turn; each caller's items leave in the order of their numbers."""

    def __init__(self) -> None:
        # Callers with waiting items only, the one served longest ago first; a new caller comes last.
        self._lines: OrderedDict[CallerId, list[tuple[int, ItemT]]] = OrderedDict()
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def put(self, caller: CallerId, number: int, item: ItemT) -> None:
        """Adds an item in front of its caller's items that have a higher number."""
        line = self._lines.setdefault(caller, [])
        bisect.insort(line, (number, item), key=_number)
        self._num_items += 1

    def callers(self) -> Sequence[CallerId]:
        """Callers with waiting items, in the order in which they are to be served."""
        return list(self._lines)

    def next_caller(self) -> CallerId:
        """The caller that is to be served next. The queue must not be empty."""
        return next(iter(self._lines))

    def oldest(self) -> tuple[int, CallerId]:
        """The lowest number, and the caller of its item. The queue must not be empty."""
        return min((line[0][0], caller) for caller, line in self._lines.items())

    def waiting(self, caller: CallerId) -> Iterator[ItemT]:
        """A caller's items in order. Valid until the queue changes."""
        return (item for _, item in self._lines.get(caller, ()))

    def take(self, caller: CallerId) -> ItemT:
        """Removes and returns the caller's first item, and moves the caller to the end of the turn order."""
        line = self._lines[caller]
        _, item = line.pop(0)
        self._lines.move_to_end(caller)
        self._removed(caller)
        return item

    def discard(self, caller: CallerId, number: int) -> None:
        """Removes the item with this number if it is still waiting. The caller keeps its turn."""
        line = self._lines.get(caller, [])
        index = bisect.bisect_left(line, number, key=_number)
        if index < len(line) and line[index][0] == number:
            del line[index]
            self._removed(caller)

    def clear(self) -> list[ItemT]:
        """Removes and returns all items."""
        items = [item for line in self._lines.values() for _, item in line]
        self._lines.clear()
        self._num_items = 0
        return items

    def _removed(self, caller: CallerId) -> None:
        self._num_items -= 1
        if not self._lines[caller]:
            del self._lines[caller]
