"""Clients without the required certificate are refused, and new certificates take effect while calls go on."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme

from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1 import encoder_service_pb2_grpc as pb_grpc
from lookonce.errors import ConfigurationError
from lookonce.sdk.connection.channel_credentials import channel_credentials
from lookonce.server import watched_files
from lookonce.server.service_entry import ServiceEntry
from lookonce.server.serving import GrpcService
from lookonce.server.settings import ServiceSettings
from lookonce.server.telemetry import Telemetry
from tests.lookonce.server.certificates import HOST, Files
from tests.lookonce.server.slow_reader import SlowReader

NAME = "lookonce.encoder.v1.EncoderService"
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", HOST)]


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: pathlib.Path, authority: trustme.CA, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setattr(watched_files, "_LOOK_S", 0.0)
    files = Files(tmp_path)
    files.issue(authority)
    return files


@contextlib.asynccontextmanager
async def serving(files: Files, *, mutual: bool) -> AsyncIterator[tuple[str, SlowReader]]:
    values: dict[str, Any] = {"tls_client_ca": files.authority} if mutual else {}
    settings = ServiceSettings(
        model=files.folder, tls_cert=files.certificate, tls_key=files.key, drain_timeout_s=0.0, **values
    )
    reader = SlowReader()
    entry = ServiceEntry(NAME, lambda server: pb_grpc.add_EncoderServiceServicer_to_server(reader, server))
    service = GrpcService(settings, Telemetry.from_settings(settings), [entry])
    target = await service.start()
    try:
        yield target, reader
    finally:
        await service.stop()


@contextlib.asynccontextmanager
async def connected(
    target: str, credentials: grpc.ChannelCredentials | None
) -> AsyncIterator[pb_grpc.EncoderServiceAsyncStub]:
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options=OPTIONS)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options=OPTIONS)
    async with channel:
        yield pb_grpc.EncoderServiceStub(channel)


async def model(target: str, credentials: grpc.ChannelCredentials | None) -> str:
    """Makes a call and returns the answer. Raises when the server cannot be reached."""
    async with connected(target, credentials) as stub:
        return str((await stub.GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5)).model)


async def is_refused(target: str, credentials: grpc.ChannelCredentials | None) -> bool:
    try:
        await model(target, credentials)
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


async def test_a_client_sees_whom_it_talks_to(files: Files) -> None:
    async with serving(files, mutual=False) as (target, _):
        assert await model(target, channel_credentials(files.authority, None, None)) == "test"
        strangers, _, _ = files.client(trustme.CA(), "stranger")
        assert await is_refused(target, channel_credentials(strangers, None, None))
        assert await is_refused(target, None)


async def test_with_an_authority_for_clients_a_client_needs_its_certificate(
    files: Files, authority: trustme.CA
) -> None:
    _, certificate, key = files.client(authority, "friend")
    _, strange_certificate, strange_key = files.client(trustme.CA(), "stranger")
    async with serving(files, mutual=True) as (target, _):
        assert await model(target, channel_credentials(files.authority, certificate, key)) == "test"
        assert await is_refused(target, channel_credentials(files.authority, None, None))
        assert await is_refused(target, channel_credentials(files.authority, strange_certificate, strange_key))


async def test_certificates_change_without_dropping_a_stream(files: Files, authority: trustme.CA) -> None:
    before = channel_credentials(files.authority, None, None)
    async with serving(files, mutual=False) as (target, reader), connected(target, before) as stub:
        call = aiter(stub.ReadEmbedding(pb.ReadEmbeddingRequest(), timeout=30))
        assert (await anext(call)).row_offset == 1
        files.issue(trustme.CA())
        after = channel_credentials(files.authority, None, None)
        assert await model(target, after) == "test", "new connections get the new certificate"
        assert await is_refused(target, before)
        reader.end.set()
        assert (await anext(call)).row_offset == 2, "the old one goes on"


async def test_half_a_rotation_leaves_the_old_pair_in_use(files: Files, authority: trustme.CA) -> None:
    credentials = channel_credentials(files.authority, None, None)
    async with serving(files, mutual=False) as (target, _):
        for content in (b"", b"no certificate", trustme.CA().issue_cert(HOST).cert_chain_pems[0].bytes()):
            files.certificate.write_bytes(content)
            assert await model(target, credentials) == "test"


@pytest.mark.parametrize("broken", ["certificate", "key", "authority"])
async def test_files_that_are_no_certificates_keep_a_server_from_starting(files: Files, broken: str) -> None:
    getattr(files, broken).write_text("none")
    with pytest.raises(ConfigurationError, match="tls_cert"):
        async with serving(files, mutual=True):
            pass


def test_half_a_pair_of_a_client_is_refused(files: Files) -> None:
    with pytest.raises(ConfigurationError, match="belong together"):
        channel_credentials(files.authority, files.certificate, None)
    with pytest.raises(ConfigurationError, match="authorities"):
        channel_credentials(None, files.certificate, files.key)
    with pytest.raises(ConfigurationError, match="cannot read"):
        channel_credentials(files.folder / "missing.pem", None, None)
