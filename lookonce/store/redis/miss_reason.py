"""Why rows did not come from the shared cache, as one bounded set of labels. Every one of them is only a miss."""

from __future__ import annotations

import enum


class MissReason(enum.Enum):
    """The value is a metric label; never a digest, an address or a server's text."""

    # Nothing is wrong.
    ABSENT = "absent"
    # The entry went away between its header and its rows.
    EVICTED = "evicted"
    # The entry was replaced while it was read, twice.
    GENERATION = "generation"

    # The entry is not what its key promises; it is deleted where the role may.
    TOO_SHORT = "too_short"
    BAD_MAGIC = "bad_magic"
    OTHER_VERSION = "other_version"
    HEADER_SEAL = "header_seal"
    WRONG_KEY = "wrong_key"
    BAD_SHAPE = "bad_shape"
    OTHER_SHAPE = "other_shape"
    LENGTH = "length"
    BLOCK_SEAL = "block_seal"
    WRONG_TYPE = "wrong_type"

    # No answer from a server: only these count against the circuit breaker.
    CONNECT_FAILED = "connect_failed"
    TIMEOUT = "timeout"
    CLOSED = "closed"
    PROTOCOL = "protocol"

    # The server answers, but not in time or not what was asked for.
    SLOW = "slow"
    AUTH = "auth"
    OOM = "oom"
    READONLY = "readonly"
    NOPERM = "noperm"
    LOADING = "loading"
    MISCONF = "misconf"
    MOVED = "moved"
    CLUSTER_DOWN = "cluster_down"
    MAX_CLIENTS = "max_clients"
    SERVER_ERROR = "server_error"

    # Nothing was asked.
    BREAKER_OPEN = "breaker_open"
    STORE_CLOSED = "store_closed"


UNREACHABLE_REASONS = frozenset({MissReason.CONNECT_FAILED, MissReason.TIMEOUT, MissReason.CLOSED, MissReason.PROTOCOL})
"""Failures of the connection itself, as opposed to an answer that does not help."""


class CacheMissError(Exception):
    """Inside the store only: this read or write ends here, for this reason."""

    def __init__(self, reason: MissReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class CorruptEntryError(CacheMissError):
    """The bytes under a key are not the sealed entry of that key."""


class RedisTroubleError(CacheMissError):
    """Redis did not answer, or not as it should; the connection must be closed."""


class RedisReplyError(RedisTroubleError):
    """Redis refused one command. The connection is still in step: later replies may be read."""
