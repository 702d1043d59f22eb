"""Channel options, credentials, metadata and deadlines of both clients. Opens no channel."""

from __future__ import annotations

import json
import math
import numbers
import os
import pathlib
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import grpc

from lookonce import tracing
from lookonce.decoder.v1 import decoder_service_pb2
from lookonce.encoder.v1 import encoder_service_pb2
from lookonce.errors import ConfigurationError, DeadlineError, InvalidParameterError
from lookonce.identity import REQUEST_ID, REQUEST_ID_KEY, REQUEST_ID_RULE
from lookonce.sdk.connection.channel_credentials import channel_credentials
from lookonce.sdk.connection.headers import checked_headers
from lookonce.sdk.connection.target import is_on_this_machine
from lookonce.sdk.connection.tokens import Token, TokenSource

_MAX_RECEIVE_BYTES = 64 << 20
_KEEPALIVE_TIME_MS = 30_000
_KEEPALIVE_TIMEOUT_MS = 5_000
# gRPC's default grows to two minutes, long after a replica is back.
_MAX_RECONNECT_BACKOFF_MS = 5_000
# gRPC's default is half a minute. A rollout can replace the pods behind a name in less.
_MIN_RESOLUTION_INTERVAL_MS = 2_000
# gRPC sends no longer deadline than 27,000 hours, about three years, and takes one of centuries for a passed one.
_MAX_TIMEOUT_S = 27_000 * 3600.0

DECODER: str = decoder_service_pb2.DESCRIPTOR.services_by_name["DecoderService"].full_name
ENCODER: str = encoder_service_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name


def channel_options(service: str | None, *, target: str) -> list[tuple[str, int | str]]:
    """Returns the options of a channel to one service, given by its full name; None: one without health checks.

    Calls are balanced over the replicas behind the target, with health checks over those that report SERVING. gRPC
    itself retries a call on another replica if no server has seen it because its connection was closing; nothing else
    is retried.
    """
    config: dict[str, object] = {"loadBalancingConfig": [{"round_robin": {}}]}
    if service is not None:
        config["healthCheckConfig"] = {"serviceName": service}
    return [
        # No limit here: the server enforces its own and answers RESOURCE_EXHAUSTED.
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", _MAX_RECEIVE_BYTES),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        # Without this the client notices a frozen server only after a minute.
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_BACKOFF_MS),
        ("grpc.dns_min_time_between_resolutions_ms", _MIN_RESOLUTION_INTERVAL_MS),
        ("grpc.service_config", json.dumps(config)),
        # Otherwise gRPC would send calls to this machine, with their token, to the proxy that http_proxy names.
        ("grpc.enable_http_proxy", int(not is_on_this_machine(target))),
    ]


def check_request_id(request_id: str | None) -> None:
    """Raises InvalidParameterError for an id that the contract does not allow; gRPC would fail in ways of its own."""
    if request_id and not (isinstance(request_id, str) and REQUEST_ID.fullmatch(request_id)):
        raise InvalidParameterError("request_id", f"{REQUEST_ID_RULE}, got {request_id!r}")


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Deadline, TLS files, token and further metadata of a client's connections."""

    # Default deadline of a call, seconds. None or math.inf: no deadline.
    timeout_s: float | None = 60.0
    # PEM file with the servers' authorities; None: plaintext.
    tls_ca: pathlib.Path | None = None
    # PEM files of the client's own certificate and key, for servers that ask for one.
    tls_cert: pathlib.Path | None = None
    tls_key: pathlib.Path | None = None
    # Bearer token of every call; see tokens.py.
    token: Token | None = field(default=None, repr=False)
    # Whether the token may go to another machine without TLS, where anybody on the way can read it.
    token_over_plaintext: bool = False
    # Largest number of retries of one call; see retries.py.
    max_retries: int = 0
    # Further metadata of every call.
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    # Interceptors of gRPC or of grpc.aio, as the client's calls are. The first one is the outermost.
    interceptors: Sequence[Any] = ()
    _tokens: TokenSource | None = field(init=False, repr=False, compare=False)
    _headers: tracing.Metadata = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises InvalidParameterError for a bad deadline or number of retries.

        Raises ConfigurationError for a bad token, and for headers that no call could send.
        """
        self.deadline(None)
        given: object = self.max_retries
        if not isinstance(given, int) or isinstance(given, bool) or given < 0:
            raise InvalidParameterError("max_retries", f"must be a whole number from 0, got {given!r}")
        allows: object = self.token_over_plaintext
        if not isinstance(allows, bool):
            raise ConfigurationError(f"token_over_plaintext must be True or False, got {allows!r}")
        object.__setattr__(self, "_tokens", None if self.token is None else TokenSource(self.token))
        object.__setattr__(self, "_headers", checked_headers(self.headers))

    def changed(
        self,
        timeout_s: float | None,
        max_retries: int | None,
        headers: Mapping[str, str] | None,
        token: Token | None,
    ) -> ConnectionOptions:
        """Returns options with other values; None leaves one as it is. The headers are added to the earlier ones."""
        merged = dict(self._headers) | dict(checked_headers({} if headers is None else headers))
        return replace(
            self,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            max_retries=self.max_retries if max_retries is None else max_retries,
            headers=merged,
            token=self.token if token is None else token,
        )

    @property
    def caller(self) -> str:
        """A text that differs between callers with different fixed tokens. Keep it secret."""
        return self.token if isinstance(self.token, str) else ""

    def check_token_is_safe(self, target: str) -> None:
        """Raises ConfigurationError if calls to `target` would show the token to whoever is on the way."""
        is_plaintext = self.token is not None and self.tls_ca is None
        if is_plaintext and not self.token_over_plaintext and not is_on_this_machine(target):
            raise ConfigurationError(
                f"the token would go to {target} without TLS; give tls_ca, or token_over_plaintext=True if the network "
                "is safe, for example a mesh with mutual TLS"
            )

    def check_has_name(self, target: str) -> None:
        """Raises ConfigurationError for a list with TLS: gRPC would look for the whole list in the certificate."""
        if self.tls_ca is not None and target.startswith(("ipv4:", "ipv6:")) and "," in target:
            raise ConfigurationError(
                "with TLS, a list of addresses has no name that a server's certificate could have; give a name that "
                f"stands for all of them in DNS; got {target}"
            )

    def deadline(self, timeout_s: float | None) -> Deadline:
        """Returns the deadline of one call; None: the client's default. Raises InvalidParameterError as Deadline."""
        chosen = self.timeout_s if timeout_s is None else timeout_s
        return Deadline.after(math.inf if chosen is None else chosen)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Returns TLS credentials, None for plaintext. Raises ConfigurationError for unusable files."""
        return channel_credentials(self.tls_ca, self.tls_cert, self.tls_key)

    def metadata(self, request_id: str | None = None) -> tracing.Metadata:
        """Returns the metadata of one call: request id (a new one for None), current trace, token and headers.

        Raises ConfigurationError for an unusable token.
        """
        pairs = [(REQUEST_ID_KEY, request_id or uuid.uuid4().hex), *tracing.metadata()]
        if self._tokens is not None:
            pairs.append(("authorization", f"Bearer {self._tokens.current()}"))
        return (*pairs, *self._headers)


@dataclass(frozen=True, slots=True)
class Deadline:
    """The common deadline of all gRPC calls that one SDK call makes."""

    # Reading of the monotonic clock, seconds. None: no deadline.
    at_s: float | None

    @classmethod
    def after(cls, timeout_s: float) -> Self:
        """Returns the deadline `timeout_s` from now; math.inf: none. A longer one than gRPC's longest becomes that.

        Raises InvalidParameterError for anything but a number above 0.
        """
        given: object = timeout_s
        seconds = _seconds(given) if isinstance(given, numbers.Real) else math.nan
        if math.isnan(seconds) or seconds <= 0:
            shown = f"{seconds:g}" if isinstance(given, numbers.Real) else repr(given)
            raise InvalidParameterError("timeout_s", f"must be a number of seconds above 0, got {shown}")
        return cls(None if math.isinf(seconds) else time.monotonic() + min(seconds, _MAX_TIMEOUT_S))

    def has_passed(self) -> bool:
        """Whether no time is left."""
        return self.at_s is not None and time.monotonic() >= self.at_s

    def remaining_s(self) -> float | None:
        """Returns the seconds left, None without a deadline. Raises DeadlineError if the deadline has passed."""
        if self.at_s is None:
            return None
        left_s = self.at_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineError("the deadline passed before the call was complete")
        return left_s


def connection_options(
    timeout_s: float | None,
    tls_ca: str | os.PathLike[str] | None,
    tls_cert: str | os.PathLike[str] | None,
    tls_key: str | os.PathLike[str] | None,
    token: Token | None,
    *,
    token_over_plaintext: bool = False,
    max_retries: int = 0,
    headers: Mapping[str, str] | None = None,
    interceptors: Sequence[Any] = (),
) -> ConnectionOptions:
    """Returns the options that the arguments of a client's `connect` give. Raises as ConnectionOptions."""
    authorities, certificate, key = (
        _path_of(name, path) for name, path in (("tls_ca", tls_ca), ("tls_cert", tls_cert), ("tls_key", tls_key))
    )
    return ConnectionOptions(
        timeout_s, authorities, certificate, key, token, token_over_plaintext, max_retries, headers or {},
        tuple(interceptors),
    )  # fmt: skip


def _path_of(name: str, path: str | os.PathLike[str] | None) -> pathlib.Path | None:
    """Returns the path that an argument names, and None for None. Raises ConfigurationError for anything else."""
    given: object = path
    if given is None:
        return None
    if given == "":
        raise ConfigurationError(f"{name} is empty; name a PEM file, or leave it out")
    if not isinstance(given, str | os.PathLike):
        raise ConfigurationError(f"{name} must be a path, not {type(given).__name__}")
    return pathlib.Path(given)


def _seconds(given: Any) -> float:
    """Returns a number as a float; of those beyond all floats, the longest deadline or one that has passed."""
    try:
        return float(given)
    except OverflowError:
        return _MAX_TIMEOUT_S if given > 0 else -_MAX_TIMEOUT_S
