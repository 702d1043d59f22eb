"""What both clients need of gRPC: channel arguments, credentials, metadata, one deadline per call. Opens nothing."""

from __future__ import annotations

import json
import pathlib
import time
import uuid
from dataclasses import dataclass
from typing import Self, TypeAlias

import grpc

from lookonce.errors import ConfigurationError, DeadlineError

_MAX_RECEIVE_BYTES = 64 << 20
_KEEPALIVE_TIME_MS = 30_000
_KEEPALIVE_TIMEOUT_MS = 5_000
_SERVICE_CONFIG = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    # The server knows its own limit and answers RESOURCE_EXHAUSTED.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", _MAX_RECEIVE_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    # Without this a frozen server is noticed only after a minute.
    ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    # Replicas behind one DNS name share the calls.
    ("grpc.service_config", _SERVICE_CONFIG),
    ("grpc.enable_retries", 0),
)

Metadata: TypeAlias = tuple[tuple[str, str], ...]
"""Key and value of each entry, as gRPC takes them."""


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to talk to the servers."""

    # Longest time of a call that does not say its own, seconds.
    timeout_s: float = 60.0
    # PEM file of the certificate authority; None is plaintext.
    tls_ca: pathlib.Path | None = None
    # Sent as a bearer token with every call. Give it together with `tls_ca`.
    token: str | None = None

    def credentials(self) -> grpc.ChannelCredentials | None:
        """TLS credentials, None for plaintext. Raises ConfigurationError when the file cannot be read."""
        if self.tls_ca is None:
            return None
        try:
            return grpc.ssl_channel_credentials(self.tls_ca.read_bytes())
        except OSError as error:
            raise ConfigurationError(f"tls_ca: cannot read {self.tls_ca}: {error.strerror}") from None

    def metadata(self, request_id: str | None = None) -> Metadata:
        """Metadata of one call; makes up a request id where there is none."""
        pairs = [("x-request-id", request_id or uuid.uuid4().hex)]
        if self.token is not None:
            pairs.append(("authorization", f"Bearer {self.token}"))
        return tuple(pairs)


@dataclass(frozen=True, slots=True)
class Deadline:
    """One point in time for all the gRPC calls that serve one call of the caller."""

    # Monotonic clock, seconds.
    at_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Self:
        """The deadline `timeout_s` from now."""
        return cls(time.monotonic() + timeout_s)

    def remaining_s(self) -> float:
        """Seconds left. Raises DeadlineError when there are none."""
        left_s = self.at_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineError("the deadline passed before the call was complete")
        return left_s
