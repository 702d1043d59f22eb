"""Rank 0's connections to all other ranks, wherever these run: they start, meet, load, and one that ends is noticed."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

from decoder_svc.runner.parallel.meeting_store import MeetingStore
from decoder_svc.runner.parallel.messages import Loaded, RankConfig, Start, encoded, received
from decoder_svc.runner.parallel.rank_engine import RankEngine
from decoder_svc.runner.parallel.rank_group import RankGroup

logger = logging.getLogger(__name__)

# While the model is loaded, a rank may end by a refusal that rank 0 finds as well, and tells better. It gets this time
# for it, seconds.
_REFUSAL_S = 10.0
# Pause between two looks whether the ranks are to be watched no more, seconds.
_LOOK_S = 0.2


def end_this_process() -> None:
    """Ends this process at once, as an engine that has died does: its service then ends all requests."""
    logger.error("a rank of the split model has ended; the engine ends with it")
    os._exit(1)


class OtherRanks:
    """Ranks 1 to `size` - 1, each at the other end of a connection."""

    def __init__(
        self,
        connections: Sequence[Connection],
        address: str | None = None,
        on_loss: Callable[[], None] = end_this_process,
    ) -> None:
        """`address` is that of this machine at which the ranks reach it; None: they are on this machine.

        `on_loss` is called on a thread when one has ended.
        """
        self.connections = tuple(connections)
        self.size = 1 + len(self.connections)
        self._address = address
        self._on_loss = on_loss
        self._is_loaded = False
        self._is_closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watcher.start()

    def meet(self, config: RankConfig, engine: RankEngine) -> RankGroup:
        """Tells each rank what it loads, and waits until all have met. `engine` is that of the device.

        Raises OSError or RuntimeError if one ends before.
        """
        for rank, connection in enumerate(self.connections, 1):
            connection.send_bytes(encoded(Start(config, rank, self.size)))
        store = MeetingStore()
        threads = store.answer(self.connections)
        logger.info("all %d ranks are there; they load the model", self.size)
        with _told_of_loss():
            group = RankGroup(0, self.size, store, engine, self._address)
        for thread in threads:
            thread.join()
        return group

    def wait_until_loaded(self) -> None:
        """Waits until each has its part of the model. Raises EOFError or OSError if one ends before."""
        with _told_of_loss():
            for connection in self.connections:
                message = received(connection)
                assert isinstance(message, Loaded), "a rank says nothing else"
        self._is_loaded = True

    def close(self) -> None:
        """Watches the ranks no more, and closes the connections, with which they end."""
        self._is_closing.set()
        self._watcher.join()
        for connection in self.connections:
            connection.close()

    def _watch(self) -> None:
        while not has_hung_up(self.connections, timeout_s=_LOOK_S):
            if self._is_closing.is_set():
                return
        if not self._is_closing.wait(0 if self._is_loaded else _REFUSAL_S):
            self._on_loss()


@contextmanager
def _told_of_loss() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, RuntimeError):
        logger.error("a rank of the split model has ended while the model was loaded; its own log says why")
        raise


def has_hung_up(connections: Sequence[Connection], timeout_s: float) -> bool:
    """Whether one of the other ends is closed, or closes within this time. Reads nothing from them."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection.fileno(), select.POLLRDHUP)
    return bool(poll.poll(1000 * timeout_s))
