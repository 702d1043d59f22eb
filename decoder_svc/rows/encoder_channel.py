"""The decoder's gRPC channel to all encoder replicas behind a target. Knows no RPC.

Certificates may be replaced at run time: new calls then use a new channel, and calls in flight finish on the old one.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
from dataclasses import dataclass

import grpc
import grpc.aio

from lookonce.sdk.connection.channel_credentials import channel_credentials
from lookonce.sdk.connection.target import is_on_this_machine
from lookonce.server.admission.authentication import parse_token
from lookonce.server.encoder_health import ENCODER_SERVICE
from lookonce.server.watched_files import Current, WatchedFiles

# gRPC's default backoff grows to two minutes, which delays calls after an encoder has recovered.
_MAX_RECONNECT_BACKOFF_MS = 2000
# gRPC's default is half a minute; a rollout may replace the pods behind the name faster.
_MIN_RESOLUTION_INTERVAL_MS = 2000
# Time that calls in flight get to finish after their certificates were replaced.
_GRACE_S = 120.0


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """Connection settings of the channel to the encoder."""

    # Largest message in either direction.
    max_message_bytes: int
    # Seconds of silence before a keepalive ping.
    keepalive_time_s: float
    # Seconds after which an unanswered ping closes the connection.
    keepalive_timeout_s: float
    # None: plaintext.
    credentials: Current[grpc.ChannelCredentials] | None = None
    # Bearer token sent with every call; None: no token.
    token: Current[str] | None = None


def watched_credentials(
    authorities: pathlib.Path | None, certificate: pathlib.Path | None, key: pathlib.Path | None
) -> WatchedFiles[grpc.ChannelCredentials] | None:
    """Returns TLS credentials that follow changes of their files; None without authorities.

    Raises ConfigurationError for files that are missing or do not fit together.
    """
    if channel_credentials(authorities, certificate, key) is None:
        return None
    # In the order of gRPC's arguments.
    paths = tuple(path for path in (authorities, key, certificate) if path is not None)
    return WatchedFiles("encoder_tls_ca, encoder_tls_cert, encoder_tls_key", paths, grpc.ssl_channel_credentials)


def watched_token(path: pathlib.Path | None) -> WatchedFiles[str] | None:
    """Returns a bearer token that follows changes of its file; None without a file.

    Raises ConfigurationError for a file that cannot be read or holds no token.
    """
    return None if path is None else WatchedFiles("encoder_token_file", (path,), parse_token)


class EncoderChannel:
    """A channel that is replaced when its certificates change. Use it on the event loop only."""

    def __init__(self, target: str, settings: ChannelSettings, health_name: str = ENCODER_SERVICE) -> None:
        """Opens the channel, which connects on first use.

        Calls go in turn to the replicas that report SERVING under `health_name`.
        """
        self._target = target
        self._health_name = health_name
        self._settings = settings
        self._credentials = None if settings.credentials is None else settings.credentials.value
        self._channel = self._open()
        # Channels with replaced certificates, which close when their calls have ended.
        self._closing: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def current(self) -> grpc.aio.Channel:
        """Returns the channel for the next call."""
        credentials = self._settings.credentials
        if credentials is not None and credentials.value is not self._credentials:
            self._credentials = credentials.value
            old, self._channel = self._channel, self._open()
            task = asyncio.get_running_loop().create_task(old.close(_GRACE_S))
            self._closing[task] = old
            task.add_done_callback(self._closing.pop)
        return self._channel

    async def close(self) -> None:
        """Closes all channels; calls in flight fail."""
        closing = dict(self._closing)
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        for channel in (*closing.values(), self._channel):
            await channel.close()

    def _open(self) -> grpc.aio.Channel:
        options = _options(self._settings, self._health_name)
        # Otherwise gRPC would ask the proxy that http_proxy names for encoders on this machine.
        options.append(("grpc.enable_http_proxy", int(not is_on_this_machine(self._target))))
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._target, options=options)
        return grpc.aio.secure_channel(self._target, self._credentials, options=options)


def _options(settings: ChannelSettings, health_name: str) -> list[tuple[str, int | str]]:
    timeout_ms = int(settings.keepalive_timeout_s * 1000)
    config = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": health_name}}
    return [
        ("grpc.service_config", json.dumps(config)),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.keepalive_time_ms", int(settings.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_BACKOFF_MS),
        ("grpc.dns_min_time_between_resolutions_ms", _MIN_RESOLUTION_INTERVAL_MS),
        ("grpc.use_local_subchannel_pool", 1),
    ]
