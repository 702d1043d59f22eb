"""The ranks learn each other's addresses through the connections that each has to rank 0.

PyTorch's engine asks a store for what other ranks have put in. Its own stores are a file, which is on one machine, and
a server on a port of its own, which answers everybody. These connections are there already, and who is at their other
end is known.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist

from decoder_svc.runner.parallel.messages import Ask, Met, Tell, Told, encoded, received

logger = logging.getLogger(__name__)


class MeetingStore(dist.Store):  # type: ignore[misc]
    """Rank 0's store. It answers the other ranks, each from a thread, until they have met."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_lost = False

    def set(self, key: str, value: str | bytes) -> None:
        """Sets the value of a key."""
        with self._changed:
            self._told[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """Waits for a value. Raises RuntimeError when a rank has ended, because it may never come."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._told or self._is_lost)
            if self._is_lost:
                raise RuntimeError("a rank of the split model has ended while the ranks met")
            return self._told[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for values, however long."""
        for key in keys:
            self.get(key)

    def answer(self, connections: Sequence[Connection]) -> list[threading.Thread]:
        """Answers the ranks at these connections, on threads that end once each has met the others or ended."""
        threads = [
            threading.Thread(target=self._answer, args=(one,), name="rank-meeting", daemon=True) for one in connections
        ]
        for thread in threads:
            thread.start()
        return threads

    def _answer(self, connection: Connection) -> None:
        has_met = False
        try:
            while not isinstance(message := received(connection), Met):
                if isinstance(message, Tell):
                    self.set(message.key, message.value)
                else:
                    assert isinstance(message, Ask), "a rank that meets the others says nothing else"
                    connection.send_bytes(encoded(Told(self.get(message.key))))
            has_met = True
        except (EOFError, OSError, RuntimeError):
            logger.info("a rank ended while the ranks met")
        finally:
            if not has_met:
                with self._changed:
                    self._is_lost = True
                    self._changed.notify_all()


class RemoteStore(dist.Store):  # type: ignore[misc]
    """The same store, seen by another rank. One thread uses it until all ranks have met, and then nobody does.

    Threads of PyTorch's engine may still ask it, and get RuntimeError: rank 0 says other things through the connection.
    """

    def __init__(self, connection: Connection) -> None:
        """`connection` leads to rank 0."""
        super().__init__()
        self._connection = connection
        self._has_left = False

    def set(self, key: str, value: str | bytes) -> None:
        """Sets the value of a key. Raises OSError when rank 0 has ended."""
        self._refuse_later()
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._connection.send_bytes(encoded(Tell(key, data)))

    def get(self, key: str) -> bytes:
        """Waits for a value. Raises EOFError or OSError when rank 0 has ended."""
        self._refuse_later()
        self._connection.send_bytes(encoded(Ask(key)))
        message = received(self._connection)
        assert isinstance(message, Told), "rank 0 says nothing else meanwhile"
        return message.value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for values, however long."""
        for key in keys:
            self.get(key)

    def leave(self) -> None:
        """Tells rank 0 that this rank has met all others."""
        self._has_left = True
        self._connection.send_bytes(encoded(Met()))

    def _refuse_later(self) -> None:
        if self._has_left:
            raise RuntimeError("the ranks have met")
