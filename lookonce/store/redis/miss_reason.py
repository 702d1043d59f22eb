"""The reasons for a miss in the shared cache, as one bounded set of labels, and the exceptions that carry them."""

from __future__ import annotations

import enum


class MissReason(enum.Enum):
    """Reason of a miss. The value is a metric label: never a digest, an address or a server's text."""

    # There is no fault.
    ABSENT = "absent"
    # The entry was evicted between the read of its header and of its rows.
    EVICTED = "evicted"
    # The entry was replaced during the read and again during the second attempt.
    GENERATION = "generation"

    # The value is not the sealed entry of its key. It is deleted if the Redis user has the right to.
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

    # No usable answer arrived. Only these count as failures for the circuit breaker.
    CONNECT_FAILED = "connect_failed"
    TIMEOUT = "timeout"
    CLOSED = "closed"
    PROTOCOL = "protocol"

    # The server answered, but too late or with an error.
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

    # No command was sent.
    BREAKER_OPEN = "breaker_open"
    STORE_CLOSED = "store_closed"


UNREACHABLE_REASONS = frozenset({MissReason.CONNECT_FAILED, MissReason.TIMEOUT, MissReason.CLOSED, MissReason.PROTOCOL})
"""Failures of the connection itself, as opposed to error replies."""


class CacheMissError(Exception):
    """Ends one operation on the shared cache, for one reason."""

    def __init__(self, reason: MissReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class CorruptEntryError(CacheMissError):
    """Raised when the bytes under a key are not the sealed entry of that key."""


class RedisTroubleError(CacheMissError):
    """Raised when Redis did not answer as expected. The connection must be closed."""


class RedisReplyError(RedisTroubleError):
    """Raised for an error reply to one command. The connection is still in step: later replies may be read."""
