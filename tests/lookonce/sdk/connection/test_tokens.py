"""Tokens are texts, files that others replace, and functions."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

import lookonce
from lookonce.errors import ConfigurationError
from lookonce.sdk.connection.channel import ConnectionOptions
from lookonce.sdk.connection.tokens import TokenSource
from tests.lookonce.sdk.sdk_servers import running_system


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("lookonce.sdk.connection.tokens.time.monotonic", lambda: now[0])
    return now


def test_a_file_is_read_again(tmp_path: pathlib.Path, clock: list[float]) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    source = TokenSource(path)
    path.write_text("second")
    assert source.current() == "first"
    clock[0] += 5.0
    assert source.current() == "second"


@pytest.mark.parametrize("content", [None, b"", b"two words", b"\xff"])
def test_the_last_token_stays_while_the_file_is_unusable(
    content: bytes | None, tmp_path: pathlib.Path, clock: list[float]
) -> None:
    path = tmp_path / "token"
    path.write_text("first")
    source = TokenSource(path)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    clock[0] += 5.0
    assert source.current() == "first"
    path.write_text("second")
    assert source.current() == "first"
    clock[0] += 5.0
    assert source.current() == "second"


@pytest.mark.parametrize("content", [None, b"", b"two words", b"\xff"])
def test_a_file_that_is_unusable_at_the_start_is_refused(content: bytes | None, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    for kind in (lookonce.Client, lookonce.AsyncClient, lookonce.AdminClient, lookonce.AsyncAdminClient):
        with pytest.raises(ConfigurationError):
            kind.connect("127.0.0.1:1", token=path)


@pytest.mark.parametrize("token", ["", "two words", "line\n", "ümlaut", 7, b"bytes"])
def test_other_tokens_are_refused_without_showing_them(token: Any) -> None:
    with pytest.raises(ConfigurationError, match="printable ASCII") as caught:
        TokenSource(token)
    assert str(token) not in str(caught.value) or not token
    with pytest.raises(ConfigurationError, match="printable ASCII"):
        TokenSource(lambda: token).current()


async def test_a_function_is_called_for_each_call() -> None:
    tokens = iter(["one", "two"])
    async with (
        running_system() as system,
        lookonce.AsyncClient.connect(system.decoder_target, token=lambda: next(tokens)) as client,
    ):
        for expected in ("one", "two"):
            await client.generate("word")
            assert system.knowledge.metadata["authorization"] == f"Bearer {expected}"


def test_options_do_not_show_the_token() -> None:
    assert "secret" not in repr(ConnectionOptions(token="secret"))
