"""gRPC's channel arguments of the services' servers, with the reason for each that is not a setting."""

from __future__ import annotations

from lookonce.server.settings import MIB, ServiceSettings

# Clients that ping more often are disconnected.
_MIN_CLIENT_PING_INTERVAL_MS = 1000
# Concurrent calls per client connection. A further one waits in its client. The server takes calls from gRPC in the
# order of their arrival, so the calls of one connection hold up all others by 0.1 ms each: 256 by 26 ms (2 x AMD EPYC,
# 2026-11-23). A service that works on many requests at once allows more, so that one connection can keep it busy.
_LEAST_CONCURRENT_CALLS = 256
_CALLS_PER_RUNNING = 4
# Calls that wait for the event loop, over all connections. gRPC refuses further ones by itself, without a reason and a
# delay, and by default from 1000 on. The event loop refuses 1200 calls per second (2 x AMD EPYC, 2026-11-23).
_MAX_PENDING_CALLS = 16384
# The part of a message that gRPC receives before the call's handler reads it. While a handler reads, a megabyte more
# may be on its way. Over 100 ms there and back, 16 MiB take 0.47 s (with 2 MiB: 0.64 s). With windows that gRPC
# chooses, they take 0.39 s on a new connection and 0.16 s on a used one, but refused calls uploaded 108 of 134 MB
# (2 x AMD EPYC, 2026-11-23).
_UNREAD_BYTES = 4 * MIB
# Time for a new connection's TLS handshake, and then for HTTP/2's. By default gRPC waits for two minutes.
_HANDSHAKE_TIMEOUT_MS = 10_000


def server_options(settings: ServiceSettings, max_message_bytes: int, max_running: int = 0) -> list[tuple[str, int]]:
    """gRPC channel arguments: limits of messages and of silent connections, keepalive, no shared ports.

    `max_message_bytes` is the largest message that the server receives, `max_running` the number of requests that it
    works on at once.
    """
    max_calls = max(_LEAST_CONCURRENT_CALLS, _CALLS_PER_RUNNING * max_running)
    keepalive_timeout_ms = int(settings.keepalive_timeout_s * 1000)
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        # By default gRPC raises the window of a connection to what the link carries, on loopback to all of a message.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", _UNREAD_BYTES),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
        ("grpc.http2.settings_timeout", _HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_concurrent_streams", max_calls),
        # gRPC counts a call until the server has cleaned up after it, so that a client cannot reset its calls and fill
        # the queue with them (CVE-2023-44487). Honest clients count a call until its answer. When all calls of a
        # connection end in one pass of the event loop, as many new ones come before the cleaning up, so that number is
        # let pass. With none, gRPC reset up to 1800 of 3000 calls at once, with 64 some, with 128 none (2026-11-24).
        ("grpc.http.overload_protection", 1),
        ("grpc.http2.max_deallocating_streams", max_calls),
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
        ("grpc.keepalive_time_ms", int(settings.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", keepalive_timeout_ms),
        ("grpc.http2.ping_timeout_ms", keepalive_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_CLIENT_PING_INTERVAL_MS),
        ("grpc.max_connection_age_ms", int(settings.max_connection_age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", int(settings.max_connection_age_grace_s * 1000)),
        ("grpc.so_reuseport", 0),
    ]
