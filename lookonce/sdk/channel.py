"""What both clients need of gRPC: channel arguments, credentials, metadata, one deadline per call. Opens nothing."""

from __future__ import annotations

import json
import os
import pathlib
import time
import uuid
from dataclasses import dataclass
from typing import Self, TypeAlias

import grpc

from lookonce import tracing
from lookonce.decoder.v1 import decoder_service_pb2
from lookonce.encoder.v1 import encoder_service_pb2
from lookonce.errors import DeadlineError
from lookonce.sdk.channel_credentials import channel_credentials

_MAX_RECEIVE_BYTES = 64 << 20
_KEEPALIVE_TIME_MS = 30_000
_KEEPALIVE_TIMEOUT_MS = 5_000
# gRPC's default grows to two minutes, so long after a replica is back.
_MAX_RECONNECT_BACKOFF_MS = 5_000
# gRPC's default is half a minute, in which a rollout may have put other pods behind the name.
_MIN_RESOLUTION_INTERVAL_MS = 2_000

DECODER: str = decoder_service_pb2.DESCRIPTOR.services_by_name["DecoderService"].full_name
ENCODER: str = encoder_service_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name

Metadata: TypeAlias = tuple[tuple[str, str], ...]
"""Key and value of each entry, as gRPC takes them."""


def channel_options(service: str) -> list[tuple[str, int | str]]:
    """For calls of one service, by its full name: replicas behind one target share them, those that say SERVING.

    A call that no server has seen, since its connection was about to end, goes to another replica by itself; nothing
    else is tried again.
    """
    config = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": service}}
    return [
        # The server knows its own limit and answers RESOURCE_EXHAUSTED.
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", _MAX_RECEIVE_BYTES),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        # Without this a frozen server is noticed only after a minute.
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_BACKOFF_MS),
        ("grpc.dns_min_time_between_resolutions_ms", _MIN_RESOLUTION_INTERVAL_MS),
        ("grpc.service_config", json.dumps(config)),
    ]


def path_of(path: str | os.PathLike[str] | None) -> pathlib.Path | None:
    """None stays None."""
    return None if path is None else pathlib.Path(path)


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to talk to the servers."""

    # Longest time of a call that does not say its own, seconds.
    timeout_s: float = 60.0
    # PEM file of the certificate authority; None is plaintext.
    tls_ca: pathlib.Path | None = None
    # PEM files by which the client shows who it is, where the servers ask for that.
    tls_cert: pathlib.Path | None = None
    tls_key: pathlib.Path | None = None
    # Sent as a bearer token with every call. Give it together with `tls_ca`.
    token: str | None = None

    def credentials(self) -> grpc.ChannelCredentials | None:
        """TLS credentials, None for plaintext. Raises ConfigurationError for files that cannot be used."""
        return channel_credentials(self.tls_ca, self.tls_cert, self.tls_key)

    def metadata(self, request_id: str | None = None) -> Metadata:
        """Metadata of one call, which is part of the current trace; makes up a request id where there is none."""
        pairs = [("x-request-id", request_id or uuid.uuid4().hex), *tracing.metadata()]
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
