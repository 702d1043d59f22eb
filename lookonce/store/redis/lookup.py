"""Finding out from servers where the nodes are: when that is due, by one thread for all, from whoever answers in time.

redis-py's classes for Sentinels and clusters ask one server after another, each for its whole time, the latter already
when it is made; here the operation's deadline holds for all of them together. Knows neither Sentinels nor clusters:
what is asked, and what becomes of the answer, is theirs.
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

DOUBTFUL_REASONS = UNREACHABLE_REASONS | {MissReason.READONLY, MissReason.CLUSTER_DOWN}
"""Trouble with a node after which another one may have its place."""

# Between looks that bring nothing new, so that trouble with one node is not multiplied by everybody's questions.
_PAUSE_S = 0.25


class Lookup:
    """`run` calls `look` when that is due, in one thread at a time; threads that come meanwhile wait for its end.

    Once something is known, a look that fails changes nothing: what is known is used on, and asked again soon.
    """

    def __init__(self, look: Callable[[float], None]) -> None:
        """`look(until_s)` finds out, until then on the monotonic clock, or raises RedisTroubleError."""
        self._look = look
        self._lock = threading.Lock()
        self._is_known = False
        # On the monotonic clock.
        self._due_s = 0.0
        self._looked_s = 0.0

    def make_due(self, *, at_once: bool = False) -> None:
        """What is known has become doubtful. `at_once`: it is certain that there is something new."""
        self._due_s = min(self._due_s, 0.0 if at_once else self._looked_s + _PAUSE_S)

    def run(self, until_s: float) -> None:
        """Returns when something is known, `until_s` at the latest. Raises RedisTroubleError when then nothing is."""
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
            # Another thread has looked meanwhile.
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


class Informants:
    """The seeds of a URL and other servers of their kind, of which any one will do. Who failed is asked last.

    Thread-safe.
    """

    def __init__(self, url: RedisUrl, budget_s: float) -> None:
        """`budget_s`: what an operation may take; one that hangs gets a quarter of it, so that another has a chance.

        Raises ConfigurationError for options that cannot be used.
        """
        self._url = url
        self._patience_s = budget_s / 4
        self._lock = threading.Lock()
        # When, on the monotonic clock.
        self._failed_s: dict[Address, float] = {}
        # Unknown options would otherwise come up at the first use.
        for connection_url in (url.seed_url, url.node_url):
            RedisNode(connection_url, url.addresses[0], budget_s)

    def distrust(self, address: Address) -> None:
        """Asks this one after the others next time."""
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
        """The first answer, of the seeds, `others`, and `first` before them. Raises RedisTroubleError.

        `question(node, deadline_s)` raises RedisTroubleError, too; the connection is one for this question only.
        """
        trouble = RedisTroubleError(MissReason.CONNECT_FAILED)
        for address in self._in_turn(others, first):
            now_s = time.monotonic()
            if now_s >= until_s:
                raise RedisTroubleError(MissReason.TIMEOUT) from trouble
            patience_s = min(self._patience_s, until_s - now_s)
            # All of it for each step of connecting, as it hangs in one of them only.
            node = RedisNode(self._url.seed_url, address, 2 * patience_s)
            try:
                answer = question(node, now_s + patience_s)
            except RedisTroubleError as error:
                self.distrust(address)
                trouble = error
            else:
                with self._lock:
                    self._failed_s.pop(address, None)
                return answer
            finally:
                node.retire()
        raise trouble

    def _in_turn(self, others: Iterable[Address], first: Address | None) -> list[Address]:
        addresses = list({*self._url.addresses, *others})
        with self._lock:
            failed_s = {address: at_s for address, at_s in self._failed_s.items() if address in addresses}
            self._failed_s = failed_s.copy()
        # Not all clients ask the same one.
        random.shuffle(addresses)
        addresses.sort(key=lambda address: failed_s.get(address, 0.0))
        if first is not None:
            addresses = [first, *(address for address in addresses if address != first)]
        return addresses
