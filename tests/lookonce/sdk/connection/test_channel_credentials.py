"""TLS files of a client: which combinations are credentials, plaintext, or a mistake."""

from __future__ import annotations

import pathlib

import grpc
import pytest
import trustme

import lookonce
from lookonce.errors import ConfigurationError, UnavailableError
from lookonce.sdk.connection.channel_credentials import SYSTEM, channel_credentials
from tests.lookonce.sdk.sdk_servers import running_system


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns a folder with authorities, a certificate and its key."""
    folder = tmp_path_factory.mktemp("pem")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    return folder


def test_without_files_the_connection_is_plaintext() -> None:
    assert channel_credentials(None, None, None) is None


def test_authorities_alone_and_with_a_certificate_are_credentials(pem: pathlib.Path) -> None:
    own = pem / "cert.pem", pem / "key.pem"
    for files in ((None, None), own):
        assert isinstance(channel_credentials(pem / "ca.pem", *files), grpc.ChannelCredentials)


@pytest.mark.parametrize("names", [("cert.pem", None), (None, "key.pem")])
def test_half_a_pair_is_refused(names: tuple[str | None, str | None], pem: pathlib.Path) -> None:
    certificate, key = (None if name is None else pem / name for name in names)
    with pytest.raises(ConfigurationError, match="belong together"):
        channel_credentials(pem / "ca.pem", certificate, key)


def test_a_certificate_without_authorities_is_refused_instead_of_sent_in_plaintext(pem: pathlib.Path) -> None:
    with pytest.raises(ConfigurationError, match="authorities"):
        channel_credentials(None, pem / "cert.pem", pem / "key.pem")


def test_a_file_that_cannot_be_read_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigurationError, match=r"missing\.pem: No such file"):
        channel_credentials(tmp_path / "missing.pem", None, None)


def test_a_file_that_is_no_pem_file_is_refused_before_a_connection_is_made(
    pem: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "text.txt").write_text("hello")
    for files in ((tmp_path / "text.txt", None, None), (pem / "ca.pem", tmp_path / "text.txt", pem / "key.pem")):
        with pytest.raises(ConfigurationError, match="is no PEM file"):
            channel_credentials(*files)


def test_the_systems_authorities_are_a_file_that_the_system_or_the_user_names(
    pem: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lookonce.sdk.connection.channel_credentials._SYSTEM_FILES", (str(tmp_path / "missing"), str(pem / "ca.pem"))
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing"))
    assert isinstance(channel_credentials(SYSTEM, None, None), grpc.ChannelCredentials)
    (tmp_path / "text.txt").write_text("hello")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "text.txt"))
    with pytest.raises(ConfigurationError, match="is no PEM file"):
        channel_credentials(SYSTEM, None, None)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing"))
    monkeypatch.setattr("lookonce.sdk.connection.channel_credentials._SYSTEM_FILES", ())
    with pytest.raises(ConfigurationError, match="name one as tls_ca"):
        channel_credentials(SYSTEM, None, None)


async def test_a_server_is_trusted_by_the_systems_authorities(
    pem: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system trusts the authority of the server, and then another one."""
    async with running_system(tls_cert=pem / "cert.pem", tls_key=pem / "key.pem") as system:
        target = system.decoder_target.replace("127.0.0.1", "localhost")
        monkeypatch.setenv("SSL_CERT_FILE", str(pem / "ca.pem"))
        async with lookonce.AsyncClient.connect(target, tls_ca="system") as client:
            assert (await client.generate("word")).text == "word +0"
        trustme.CA().cert_pem.write_to_path(pem / "other.pem")
        monkeypatch.setenv("SSL_CERT_FILE", str(pem / "other.pem"))
        async with lookonce.AsyncClient.connect(target, tls_ca="system") as client:
            with pytest.raises(UnavailableError):
                await client.generate("word")
