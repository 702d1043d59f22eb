"""An address on which a service cannot listen is found before the model is loaded."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from lookonce.errors import ConfigurationError
from lookonce.local.reserved_port import reserved_port
from lookonce.server.addresses import check_addresses
from tests.lookonce.server.running_server import running_server, server_settings


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("name", ["listen", "admin_listen", "health_listen", "metrics_listen"])
def test_a_taken_port_is_refused_by_the_name_of_its_flag(name: str, taken: int) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_addresses(server_settings(**{name: f"127.0.0.1:{taken}"}))
    flag = f"--{name.replace('_', '-')}"
    assert caught.value.message == f"{flag}: cannot listen on 127.0.0.1:{taken}: Address already in use"


def test_a_port_of_one_family_is_taken_for_all_addresses(taken: int) -> None:
    with pytest.raises(ConfigurationError, match="already in use"):
        check_addresses(server_settings(listen=f"0.0.0.0:{taken}", insecure=True))


async def test_the_port_of_a_running_service_is_taken_and_free_after_its_end() -> None:
    async with running_server() as running:
        settings = server_settings(listen=running.service.target)
        with pytest.raises(ConfigurationError, match="already in use"):
            check_addresses(settings)
        await running.health_of("")
    check_addresses(settings)


@pytest.mark.parametrize("address", ["203.0.113.7:50051", "no-such-host.invalid:50051"])
def test_an_address_of_another_machine_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--listen: cannot listen on {address}"):
        check_addresses(server_settings(listen=address, insecure=True))


def test_free_and_reserved_ports_and_names_of_this_machine_are_fine() -> None:
    with reserved_port() as port:
        check_addresses(
            server_settings(listen=f"localhost:{port}", admin_listen="127.0.0.1:0", health_listen="[::1]:0")
        )
        check_addresses(server_settings(listen=f"127.0.0.1:{port}", metrics_listen="127.0.0.1:0"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("127.0.0.1", "localhost"),
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "0.0.0.0"),
        ("0.0.0.0", "[::]"),
        ("127.0.0.1", "[::]"),
        ("[::1]", "0.0.0.0"),
        ("127.0.0.1", "[::ffff:127.0.0.1]"),
    ],
)
def test_two_settings_with_one_address_in_other_words_are_refused(one: str, other: str) -> None:
    with reserved_port() as port:
        addresses = (f"{one}:{port}", f"{other}:{port}")
        for first, second in (("listen", "health_listen"), ("admin_listen", "metrics_listen")):
            with pytest.raises(ConfigurationError) as caught:
                check_addresses(server_settings(insecure=True, **dict(zip((first, second), addresses, strict=True))))
            flags = [
                f"--{name.replace('_', '-')} {text}" for name, text in zip((first, second), addresses, strict=True)
            ]
            assert caught.value.message.startswith(f"{flags[0]} and {flags[1]} are one address")


def test_other_ports_and_other_addresses_of_this_machine_are_no_conflict() -> None:
    with reserved_port() as port, reserved_port() as other:
        check_addresses(server_settings(listen=f"127.0.0.1:{port}", health_listen=f"localhost:{other}"))
        check_addresses(server_settings(listen=f"127.0.0.1:{port}", health_listen=f"127.0.0.2:{port}"))
