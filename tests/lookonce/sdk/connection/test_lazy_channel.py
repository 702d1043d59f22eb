"""Clients for asyncio are made before their event loop, and belong to the one of their first call."""

from __future__ import annotations

import asyncio
import pathlib
import threading

import pytest

import lookonce
from lookonce.errors import ConfigurationError, UnsupportedError
from tests.lookonce.sdk.sdk_servers import running_system


def test_a_client_is_made_before_its_event_loop() -> None:
    target = ""
    is_up, is_over = threading.Event(), threading.Event()

    async def serve() -> None:
        nonlocal target
        async with running_system() as system:
            target = system.decoder_target
            is_up.set()
            await asyncio.to_thread(is_over.wait)

    server = threading.Thread(target=asyncio.run, args=(serve(),))
    server.start()
    try:
        assert is_up.wait(30)
        client = lookonce.AsyncClient.connect(target)
        admin = lookonce.AsyncAdminClient.connect(target)

        async def use() -> str:
            with pytest.raises(UnsupportedError):
                await admin.stats()
            return (await client.generate("one")).text

        async def use_and_close() -> str:
            text = await use()
            await client.aclose()
            await admin.aclose()
            return text

        loop = asyncio.new_event_loop()
        try:
            assert loop.run_until_complete(use()) == "one +0"
            with pytest.raises(ConfigurationError, match="another event loop"):
                asyncio.run(asyncio.wait_for(client.generate("one"), 30))
            assert loop.run_until_complete(use_and_close()) == "one +0"
        finally:
            loop.close()
    finally:
        is_over.set()
        server.join()


def test_unusable_files_are_still_noticed_at_once(tmp_path: pathlib.Path) -> None:
    for connect in (lookonce.AsyncClient.connect, lookonce.AsyncAdminClient.connect):
        with pytest.raises(ConfigurationError, match="TLS"):
            connect("127.0.0.1:1", tls_ca=tmp_path / "missing.pem")


async def test_a_client_that_was_never_used_closes() -> None:
    for client in (lookonce.AsyncClient.connect("127.0.0.1:1"), lookonce.AsyncAdminClient.connect("127.0.0.1:1")):
        await client.aclose()
