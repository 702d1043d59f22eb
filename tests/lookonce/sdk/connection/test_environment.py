"""Clients that are connected without a target take it, their token and their files from the environment."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import pytest

import lookonce
from lookonce.errors import ConfigurationError
from tests.lookonce.sdk.sdk_servers import running_system

KINDS: list[Any] = [lookonce.Client, lookonce.AsyncClient]


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TARGET", "TOKEN", "TLS_CA", "TLS_CERT", "TLS_KEY"):
        monkeypatch.delenv(f"LOOKONCE_{name}", raising=False)


async def test_target_and_token_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_system() as system:
        monkeypatch.setenv("LOOKONCE_TARGET", f" {system.decoder_target}\n")
        monkeypatch.setenv("LOOKONCE_TOKEN", "secret\n")
        async with lookonce.AsyncClient.connect() as client:
            assert (await client.generate("word")).text == "word +0"
        assert system.knowledge.metadata["authorization"] == "Bearer secret"
        with lookonce.Client.connect(token="other") as sync:
            assert (await asyncio.to_thread(sync.generate, "word")).text == "word +0"
        assert system.knowledge.metadata["authorization"] == "Bearer other"
        # The environment's token is for its own target.
        async with lookonce.AsyncClient.connect(system.decoder_target) as client:
            await client.generate("word")
        assert "authorization" not in system.knowledge.metadata


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [None, "", "  "])
def test_without_any_target_the_error_says_how_to_name_one(
    kind: Any, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv("LOOKONCE_TARGET", value)
    with pytest.raises(ConfigurationError, match="set LOOKONCE_TARGET"):
        kind.connect()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["TLS_CA", "TLS_CERT", "TLS_KEY"])
def test_files_come_from_the_environment_and_an_empty_name_is_no_plaintext(
    kind: Any, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("LOOKONCE_TARGET", "127.0.0.1:1")
    monkeypatch.setenv(f"LOOKONCE_{name}", "")
    with pytest.raises(ConfigurationError, match=f"LOOKONCE_{name} is empty"):
        kind.connect()
    monkeypatch.setenv(f"LOOKONCE_{name}", str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigurationError, match=r"TLS|belong together|needs tls_ca"):
        kind.connect()
