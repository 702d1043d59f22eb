"""The server shell's view of a gRPC service: its name, its handlers, and what the shell must know of its methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import grpc.aio


@dataclass(frozen=True, slots=True)
class ServiceEntry:
    """One gRPC service that the process serves."""

    # Name in the proto file, in health and in reflection, for example "lookonce.encoder.v1.EncoderService".
    full_name: str
    # Registers the servicer, for example `lambda server: add_EncoderServiceServicer_to_server(servicer, server)`.
    add_to_server: Callable[[grpc.aio.Server], None]
    # Further names of this service in health, for clients that may use certain replicas only.
    health_names: tuple[str, ...] = ()
    # Longest time of calls without a deadline, seconds, by the method's name. Other methods may take any time.
    default_timeouts_s: Mapping[str, float] = field(default_factory=dict)
    # Names of unary methods whose calls take seconds, so that they outlast the delay of a drain.
    long_methods: frozenset[str] = frozenset()
    # Requests that the service works on at once.
    max_running: int = 0
