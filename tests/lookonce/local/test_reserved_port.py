"""A reserved port belongs to one server only. Tested with a real gRPC server and real sockets."""

from __future__ import annotations

import contextlib
import pathlib
import socket

import pytest

from lookonce.errors import ConfigurationError
from lookonce.local.reserved_port import reserved_port
from lookonce.server.serving import GrpcService
from lookonce.server.settings import ServiceSettings
from lookonce.server.telemetry import Telemetry


async def test_a_grpc_server_can_take_the_port_while_it_is_reserved() -> None:
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        values = {"model": pathlib.Path("."), "listen": address, "drain_timeout_s": 0.0}
        service = GrpcService(ServiceSettings.model_validate(values), Telemetry(), [])
        assert await service.start() == address
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        await service.stop()


def test_reserved_ports_differ_and_no_other_socket_gets_them() -> None:
    with contextlib.ExitStack() as exits:
        reserved = {exits.enter_context(reserved_port()) for _ in range(50)}
        assert len(reserved) == 50
        others = [exits.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(200)]
        assert reserved.isdisjoint(other.getsockname()[1] for other in others)


def test_a_port_that_another_program_listens_on_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} cannot be used"), reserved_port(port):
            pass
    with reserved_port(port) as reserved:
        assert reserved == port
