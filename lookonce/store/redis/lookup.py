"""Discovery of the topology: decides when to ask for it, and asks one server after another within one deadline.

redis-py's classes for Sentinels and clusters give each server they ask its full timeout, and the cluster class already
asks in its constructor. Here the deadline of the operation bounds all questions together. What is asked and how the
answer is used is up to sentinel.py and cluster.py.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from lookonce.store.redis.miss_reason import UNREACHABLE_REASONS, MissReason, RedisTroubleError
from lookonce.store.redis.node import RedisNode
from lookonce.store.redis.url import Address, RedisUrl

AnswerT = TypeVar("AnswerT")

STALE_TOPOLOGY_REASONS = UNREACHABLE_REASONS | {MissReason.READONLY, MissReason.CLUSTER_DOWN}
"""Reasons that suggest that another server has taken the place of the node."""

# Shortest time between two lookups that trouble with a node prompted. Without it, every failed operation would ask.
_PAUSE_S = 0.25


class Lookup:
    """Calls `look` when a lookup is due, in one thread at a time. Other threads wait for its end. Thread-safe.

    After the first success a failed lookup changes nothing: the known topology stays in use, and the next lookup
    follows soon.
    """

    def __init__(self, look: Callable[[float], None]) -> None:
        """`look(until_s)` reads the topology, until `until_s` on the monotonic clock, or raises RedisTroubleError."""
        self._look = look
        self._lock = threading.Lock()
        self._is_known = False
        # Times of the next and of the last lookup, on the monotonic clock.
        self._due_s = 0.0
        self._looked_s = 0.0

    def make_due(self, *, at_once: bool = False) -> None:
        """Schedules a lookup after the pause, or `at_once` when the topology has certainly changed."""
        self._due_s = min(self._due_s, 0.0 if at_once else self._looked_s + _PAUSE_S)

    def run(self, until_s: float) -> None:
        """Returns once the topology is known. Raises RedisTroubleError when it is still unknown at `until_s`."""
        if time.monotonic() < self._due_s:
            return
        if self._lock.acquire(timeout=max(0.0, until_s - time.monotonic())):
            try:
                self._run_alone(until_s)
            finally:
                self._lock.release()
        elif not self._is_known:
            raise RedisTroubleError(MissReason.TIMEOUT)

    def _run_alone(self, until_s: float) -> None:
        now_s = time.monotonic()
        if now_s < self._due_s:
            # Another thread has just done it.
            return
        if now_s >= until_s:
            if self._is_known:
                return
            raise RedisTroubleError(MissReason.SLOW)
        self._looked_s = now_s
        try:
            self._look(until_s)
        except RedisTroubleError:
            if not self._is_known:
                raise
            self._due_s = time.monotonic() + _PAUSE_S
        else:
            self._is_known = True
            self._due_s = float("inf")


class TopologySources:
    """The servers that know the topology: those named in the URL, and others found since. Thread-safe.

    Any of them can answer. Those that failed are asked last.
    """

    def __init__(self, url: RedisUrl, budget_s: float) -> None:
        """`budget_s`: longest time of an operation, seconds. A server that hangs gets a quarter of it.

        Raises ConfigurationError for options that cannot be used.
        """
        self._url = url
        self._patience_s = budget_s / 4
        self._lock = threading.Lock()
        # Time of the last failure of each server, on the monotonic clock.
        self._failed_s: dict[Address, float] = {}
        # Raises for unknown options, which would otherwise fail at the first use.
        for connection_url in (url.seed_url, url.node_url):
            RedisNode(connection_url, url.addresses[0], budget_s)

    def ask_last(self, address: Address) -> None:
        """Moves a server behind the others for the next question."""
        with self._lock:
            self._failed_s[address] = time.monotonic()

    def ask(
        self,
        question: Callable[[RedisNode, float], AnswerT],
        until_s: float,
        *,
        others: Iterable[Address] = (),
        first: Address | None = None,
    ) -> AnswerT:
        """Returns the first answer that a server gives. Raises RedisTroubleError when there is none until `until_s`.

        The servers are those of the URL and `others`; `first` is asked before them. `question(node, deadline_s)` asks
        one server, or raises RedisTroubleError. Its connection is closed afterwards.
        """
        trouble = RedisTroubleError(MissReason.CONNECT_FAILED)
        for address in self._in_turn(others, first):
            now_s = time.monotonic()
            if now_s >= until_s:
                raise RedisTroubleError(MissReason.TIMEOUT) from trouble
            patience_s = min(self._patience_s, until_s - now_s)
            # A node gives each step of connecting half of its budget. A server that hangs does so in one step only,
            # so each step may take all of the time.
            node = RedisNode(self._url.seed_url, address, 2 * patience_s)
            try:
                answer = question(node, now_s + patience_s)
            except RedisTroubleError as error:
                self.ask_last(address)
                trouble = error
            else:
                with self._lock:
                    self._failed_s.pop(address, None)
                return answer
            finally:
                node.retire()
        raise trouble

    def ask_each(self, question: Callable[[RedisNode, float], AnswerT], until_s: float) -> list[AnswerT]:
        """Returns the answer of each server of the URL that gives one. Raises RedisTroubleError if none does.

        `question` is as in `ask`.
        """
        answers: list[AnswerT] = []
        trouble = RedisTroubleError(MissReason.CONNECT_FAILED)
        for address in self._url.addresses:
            patience_s = min(self._patience_s, until_s - time.monotonic())
            if patience_s <= 0:
                raise RedisTroubleError(MissReason.TIMEOUT)
            node = RedisNode(self._url.seed_url, address, 2 * patience_s)
            try:
                answers.append(question(node, time.monotonic() + patience_s))
            except RedisTroubleError as error:
                trouble = error
            finally:
                node.retire()
        if not answers:
            raise trouble
        return answers

    def _in_turn(self, others: Iterable[Address], first: Address | None) -> list[Address]:
        addresses = list({*self._url.addresses, *others})
        with self._lock:
            failed_s = {address: at_s for address, at_s in self._failed_s.items() if address in addresses}
            self._failed_s = failed_s.copy()
        # Shuffled, so that clients do not all ask the same server.
        random.shuffle(addresses)
        addresses.sort(key=lambda address: failed_s.get(address, 0.0))
        if first is not None:
            addresses = [first, *(address for address in addresses if address != first)]
        return addresses
