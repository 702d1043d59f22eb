"""The way to the encoders: certificates of both ends change, and no call notices."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from typing import Any

import pytest
import trustme

from decoder_svc.rows.encoder_channel import EncoderChannel, watched_credentials
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1 import encoder_service_pb2_grpc as pb_grpc
from lookonce.errors import ConfigurationError
from lookonce.server import watched_files
from lookonce.server.service_entry import ServiceEntry
from lookonce.server.settings import ServiceSettings
from tests.decoder_svc.encoders import CHANNEL, served
from tests.lookonce.server.certificates import Files
from tests.lookonce.server.slow_reader import SlowReader

NAME = "lookonce.encoder.v1.EncoderService"


@pytest.fixture
def files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setattr(watched_files, "_LOOK_S", 0.0)
    files = Files(tmp_path)
    files.issue(trustme.CA())
    return files


async def test_both_ends_change_their_certificates_under_a_stream(files: Files) -> None:
    reader = SlowReader()
    values: dict[str, Any] = {"model": files.folder, "drain_timeout_s": 0.5, "tls_client_ca": files.authority}
    settings = ServiceSettings(tls_cert=files.certificate, tls_key=files.key, **values)
    entry = ServiceEntry(NAME, lambda server: pb_grpc.add_EncoderServiceServicer_to_server(reader, server))
    credentials = watched_credentials(files.authority, files.certificate, files.key)
    async with served(settings, entry) as target:
        channel = EncoderChannel(target, replace(CHANNEL, credentials=credentials))

        def stub() -> pb_grpc.EncoderServiceAsyncStub:
            return pb_grpc.EncoderServiceStub(channel.current())

        before = channel.current()
        call = aiter(stub().ReadEmbedding(pb.ReadEmbeddingRequest(), timeout=30))
        assert (await anext(call)).row_offset == 1
        files.issue(trustme.CA())
        assert (await stub().GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=10)).model == "test"
        assert channel.current() is not before, "nothing else is let in by the new authority"
        reader.end.set()
        assert (await anext(call)).row_offset == 2
        await channel.close()


async def test_closing_ends_the_channels_of_old_certificates_too(files: Files) -> None:
    channel = EncoderChannel(
        "127.0.0.1:1", replace(CHANNEL, credentials=watched_credentials(files.authority, None, None))
    )
    before = channel.current()
    files.issue(trustme.CA())
    assert channel.current() is not before
    await channel.close()
    with pytest.raises(Exception, match="closed"):
        await pb_grpc.EncoderServiceStub(before).GetEncoderInfo(pb.GetEncoderInfoRequest(), timeout=5)


def test_without_authorities_it_is_plaintext(files: Files) -> None:
    assert watched_credentials(None, None, None) is None
    with pytest.raises(ConfigurationError):
        watched_credentials(None, files.certificate, files.key)
