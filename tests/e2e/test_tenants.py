"""Tenants of one deployment with tokens and certificates: nobody reads, times by answers, or uses what is another's."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import trustme
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from lookonce.client import Client
from lookonce.common.v1 import common_pb2
from lookonce.content_key import image_digest
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb
from lookonce.decoder.v1.decoder_service_pb2_grpc import DecoderServiceStub
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1 import encoder_service_pb2_grpc as pb_grpc
from lookonce.errors import (
    EmbeddingNotCachedError,
    InvalidParameterError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from lookonce.images import ImageRef
from lookonce.local.local_stack import LocalStack
from lookonce.local.token_entry import new_token
from lookonce.sdk.replies import error_of_item
from lookonce.status_codes import from_rpc_error
from tests.conftest import DEMO_MODEL, ONE_THREAD
from tests.e2e.pictures import QUESTION, fresh

TENANTS = ("acme", "beta")
# Enough for a busy machine. An eviction is repeated after four times this time.
BUDGET = ("--redis-budget-s", "1")
ADMIN = ("--admin-listen", "127.0.0.1:0")
QUOTAS = """
[tenants.tiny]
requests_per_s = 0.02
[tenants.narrow]
image_bytes_per_s = 1
[tenants.flat]
image_pixels_per_s = 1
"""


@dataclass(frozen=True, slots=True)
class Guarded:
    """A stack behind tokens and certificates."""

    stack: LocalStack
    # By tenant, of clients; and of an operator under "operator".
    tokens: dict[str, str]
    ca: pathlib.Path
    cert: pathlib.Path
    key: pathlib.Path

    def client(self, tenant: str | None) -> Client:
        """Returns a client with the tenant's token, or without a token for None."""
        return Client.connect(
            self.stack.decoder_targets[0],
            self.stack.encoder_targets[0],
            tls_ca=self.ca,
            tls_cert=self.cert,
            tls_key=self.key,
            token=None if tenant is None else self.tokens[tenant],
            # A quota that is used up is told at once.
            max_retries=0,
        )

    def metadata(self, name: str) -> tuple[tuple[str, str]]:
        """Returns the metadata for a call that is made without the SDK."""
        return (("authorization", f"Bearer {self.tokens[name]}"),)

    def channel(self, target: str) -> grpc.Channel:
        """Returns a channel for calls that are made without the SDK."""
        credentials = grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes())
        return grpc.secure_channel(target, credentials)

    @property
    def num_encodes(self) -> int:
        return int(self.stack.metric(self.stack.encoders, "lookonce_encoder_encodes_total"))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    authority = trustme.CA()
    ca, cert, key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
    issued = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(ca)
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    tokens, entries = {}, []
    for name, tenant, role in [
        *((tenant, tenant, "client") for tenant in (*TENANTS, "tiny", "narrow", "flat")),
        ("operator", "", "operator"),
        ("decoder", "", "service"),
    ]:
        tokens[name], entry = new_token(name, tenant, role)
        entries.append(entry)
    (folder / "tokens.toml").write_text("".join(entries))
    (folder / "decoder.token").write_text(tokens["decoder"])
    (folder / "quotas.toml").write_text(QUOTAS)
    (folder / "secret").write_text("ab" * 32)
    shared = ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(ca)]
    shared += ["--auth-tokens-file", str(folder / "tokens.toml"), "--tenant-secret-file", str(folder / "secret")]
    shared += ["--quotas-file", str(folder / "quotas.toml"), *ONE_THREAD, *BUDGET]
    to_encoder = ["--encoder-tls-ca", str(ca), "--encoder-tls-cert", str(cert), "--encoder-tls-key", str(key)]
    to_encoder += ["--encoder-token-file", str(folder / "decoder.token")]
    with LocalStack(DEMO_MODEL, encoder_arguments=shared, decoder_arguments=[*shared, *to_encoder, *ADMIN]) as stack:
        yield Guarded(stack, tokens, ca, cert, key)


def test_each_tenant_is_answered_and_encodes_for_itself(guarded: Guarded) -> None:
    (picture,) = fresh(1)
    before = guarded.num_encodes
    for number, tenant in enumerate(TENANTS, start=1):
        with guarded.client(tenant) as client:
            for attempt in range(2):
                generation = client.generate(QUESTION, [picture.data], max_tokens=16, temperature=0.0)
                assert generation.text == picture.answer
                # The first time nothing of another tenant's shows, not in the prefix cache either.
                assert (generation.usage.cached_prompt_tokens > 0) == (attempt == 1)
                assert (generation.usage.encoded_image_tokens > 0) == (attempt == 0)
        assert guarded.num_encodes == before + number


def test_another_tenant_s_image_and_an_unknown_one_get_one_and_the_same_answer(guarded: Guarded) -> None:
    theirs, unknown = (picture.data for picture in fresh(2))
    with guarded.client("acme") as client:
        client.generate(QUESTION, [theirs], max_tokens=1)
        client.generate(QUESTION, [ImageRef(image_digest(theirs))], max_tokens=1)
    answers = []
    with guarded.client("beta") as client:
        for data in (theirs, unknown):
            with pytest.raises(EmbeddingNotCachedError) as caught:
                client.generate(QUESTION, [ImageRef(image_digest(data))], max_tokens=1)
            answers.append((caught.value.message, caught.value.metadata))
    assert answers[0] == answers[1]


def test_calls_without_a_token_are_refused(guarded: Guarded) -> None:
    (picture,) = fresh(1)
    before = guarded.num_encodes
    with guarded.client(None) as client, pytest.raises(UnauthenticatedError):
        client.generate(QUESTION, [picture.data], max_tokens=1)
    with guarded.client(None) as client, pytest.raises(UnauthenticatedError):
        client.encode([picture.data])
    assert guarded.num_encodes == before


def methods_of(channel: grpc.Channel, token: str) -> list[str]:
    """ "/package.Service/Method" of everything that the server's reflection knows."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    def ask(request: reflection_pb2.ServerReflectionRequest) -> reflection_pb2.ServerReflectionResponse:
        metadata = (("authorization", f"Bearer {token}"),)
        return next(stub.ServerReflectionInfo(iter([request]), metadata=metadata, timeout=10))

    found = []
    listed = ask(reflection_pb2.ServerReflectionRequest(list_services="")).list_services_response.service
    for service in listed:
        answer = ask(reflection_pb2.ServerReflectionRequest(file_containing_symbol=service.name))
        for serialized in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(serialized)
            for described in file.service:
                if f"{file.package}.{described.name}" == service.name:
                    found += [f"/{service.name}/{method.name}" for method in described.method]
    return found


def test_every_method_of_every_service_is_refused_without_a_token(guarded: Guarded) -> None:
    num_methods = 0
    for process in (*guarded.stack.encoders, *guarded.stack.decoders):
        ready = process.ready
        assert ready.admin_target is not None
        with (
            guarded.channel(ready.target) as channel,
            guarded.channel(ready.admin_target) as admin_channel,
        ):
            methods = methods_of(admin_channel, guarded.tokens["operator"])
            for method in methods:
                place = admin_channel if "Admin" in method or "reflection" in method else channel
                is_open = method.startswith("/grpc.health.v1.Health/")
                for metadata in ((), (("authorization", "Bearer wrong"),)):
                    call: Any = place.unary_stream(method)
                    # A watch of health does not end by itself.
                    code = call(b"", metadata=metadata, timeout=0.5 if is_open else 10).code()
                    assert (code is grpc.StatusCode.UNAUTHENTICATED) is not is_open, (method, code)
            num_methods += len(methods)
    # Five and five of the encoder, seven of the decoder; health and reflection of both.
    assert num_methods >= 17 + 2 * 3


def test_connections_without_a_certificate_are_refused(guarded: Guarded) -> None:
    target = guarded.stack.decoder_targets[0]
    for ca in (None, guarded.ca):
        with (
            Client.connect(target, token=guarded.tokens["acme"], timeout_s=5, tls_ca=ca) as client,
            pytest.raises(UnavailableError),
        ):
            client.generate("hello", max_tokens=1)


def test_a_tenant_s_quota_is_its_own(guarded: Guarded) -> None:
    with guarded.client("tiny") as client:
        client.generate("hello", max_tokens=1)
        with pytest.raises(OverloadedError) as caught:
            client.generate("hello", max_tokens=1)
        assert 0 < caught.value.retry_after_s <= 50
    with guarded.client("acme") as client:
        client.generate("hello", max_tokens=1)


def images_stream(*images: bytes) -> Iterator[pb.EncodeStreamRequest]:
    for number, data in enumerate(images):
        item = pb.EncodeItem(image=common_pb2.ImageSource(data=data))
        yield pb.EncodeStreamRequest(item_id=str(number), item=item)


@pytest.mark.parametrize("limited", ["narrow", "flat"])
def test_image_bytes_and_pixels_count_within_a_stream(guarded: Guarded, limited: str) -> None:
    images = [picture.data for picture in fresh(4)]
    with guarded.channel(guarded.stack.encoder_targets[0]) as channel:
        stub = pb_grpc.EncoderServiceStub(channel)
        answers = {
            tenant: list(stub.EncodeStream(images_stream(*images), metadata=guarded.metadata(tenant), timeout=60))
            for tenant in (limited, "acme")
        }
    assert not any(answer.HasField("error") for answer in answers["acme"])
    refused = [answer.error for answer in answers[limited] if answer.HasField("error")]
    assert len(answers[limited]) == 4
    assert [error.reason for error in refused] == ["OVERLOADED"] * 3
    for error in map(error_of_item, refused):
        assert isinstance(error, OverloadedError)
        assert error.retry_after_s > 1


@pytest.mark.parametrize("limited", ["narrow", "flat"])
def test_image_bytes_and_pixels_count_where_they_are_only_looked_at(guarded: Guarded, limited: str) -> None:
    (picture,) = fresh(1)
    part = decoder_pb.ContentPart(image=common_pb2.ImageSource(data=picture.data))
    message = decoder_pb.ChatMessage(role=decoder_pb.ROLE_USER, parts=[part])
    request = decoder_pb.TokenizeRequest(chat=decoder_pb.ChatPrompt(messages=[message]))
    with guarded.channel(guarded.stack.decoder_targets[0]) as channel:
        stub = DecoderServiceStub(channel)
        assert stub.Tokenize(request, metadata=guarded.metadata(limited), timeout=60).images
        with pytest.raises(grpc.RpcError) as caught:
            stub.Tokenize(request, metadata=guarded.metadata(limited), timeout=60)
        assert isinstance(from_rpc_error(caught.value), OverloadedError)


def test_a_request_is_its_tenant_s_to_name_and_to_end(guarded: Guarded) -> None:
    chat = decoder_pb.ChatPrompt(
        messages=[decoder_pb.ChatMessage(role=decoder_pb.ROLE_USER, parts=[decoder_pb.ContentPart(text="hello")])]
    )
    sampling = decoder_pb.SamplingParams(max_tokens=1900, ignore_eos=True, temperature=0.0)
    params = decoder_pb.GenerateParams(request_id="order-17", chat=chat, sampling=sampling)
    with guarded.channel(guarded.stack.decoder_targets[0]) as channel:
        stub = DecoderServiceStub(channel)

        def begun(tenant: str) -> Any:
            request = decoder_pb.GenerateStreamRequest(params=params)
            call = stub.GenerateStream(request, metadata=guarded.metadata(tenant), timeout=60)
            assert next(call).started.request_id == "order-17"
            return call

        def abort(name: str) -> None:
            request = decoder_pb.AbortRequestRequest(request_id="order-17")
            stub.AbortRequest(request, metadata=guarded.metadata(name), timeout=10)

        mine, theirs = begun("acme"), begun("beta")
        for name in ("decoder", "beta"):
            abort(name)
        assert list(theirs)[-1].finished.finish_reason == decoder_pb.FINISH_REASON_ABORT
        assert list(mine)[-1].finished.finish_reason == decoder_pb.FINISH_REASON_LENGTH
        both = [begun("acme"), begun("beta")]
        abort("operator")
        for call in both:
            assert list(call)[-1].finished.finish_reason == decoder_pb.FINISH_REASON_ABORT


def test_the_log_says_which_operator_changed_the_cache(guarded: Guarded) -> None:
    encoder = guarded.stack.encoders[0]
    assert encoder.ready.admin_target is not None
    with guarded.channel(encoder.ready.admin_target) as channel:
        request = pb.EvictEmbeddingsRequest(all_of_tenant=True, tenant="acme")
        pb_grpc.EncoderAdminServiceStub(channel).EvictEmbeddings(
            request, metadata=guarded.metadata("operator"), timeout=30
        )
    lines = [json.loads(line) for line in encoder.log_path.read_text().splitlines() if line.startswith("{")]
    done = [line for line in lines if line.get("action") == "evict"]
    assert [(line["event"].rpartition(" ")[2], line["identity"], line["tenant"]) for line in done] == [
        ("begins", "operator", "acme"),
        ("ends", "operator", "acme"),
    ]


def test_operators_calls_are_not_for_clients(guarded: Guarded) -> None:
    admin_target = guarded.stack.encoders[0].ready.admin_target
    assert admin_target is not None
    with guarded.channel(admin_target) as channel:
        stub = pb_grpc.EncoderAdminServiceStub(channel)

        def stats(name: str) -> pb.GetCacheStatsResponse:
            return stub.GetCacheStats(pb.GetCacheStatsRequest(), metadata=guarded.metadata(name), timeout=10)

        assert stats("operator").local.entries >= 0
        for name in ("acme", "decoder"):
            with pytest.raises(grpc.RpcError) as caught:
                stats(name)
            assert isinstance(from_rpc_error(caught.value), PermissionDeniedError)


def test_logs_tell_nothing_that_is_secret(guarded: Guarded) -> None:
    (picture,) = fresh(1)
    word = "xylophone-and-quince"
    with guarded.client("acme") as client:
        for image in (picture.data, ImageRef(image_digest(picture.data))):
            client.generate(f"Tell me of {word}.", [image], max_tokens=4)
    with guarded.client("beta") as client, pytest.raises(EmbeddingNotCachedError):
        client.generate(word, [ImageRef(image_digest(picture.data))], max_tokens=4)
    with guarded.client(None) as client, pytest.raises(UnauthenticatedError):
        client.generate(word, max_tokens=1)
    processes = [*guarded.stack.encoders, *guarded.stack.decoders]
    text = "".join(process.log_path.read_text() for process in processes)
    # gRPC's own core writes of handshakes that failed, in a form of its own.
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert not any(token in text for token in guarded.tokens.values())
    assert word not in text
    assert image_digest(picture.data).hex()[:16] not in text
    assert image_digest(picture.data).hex()[-16:] not in text
    calls = [line for line in lines if line["event"] == "rpc"]
    assert {"Encode", "Generate"} <= {line["method"].rpartition("/")[2] for line in calls}
    assert all(line["request_id"] and line["duration_s"] >= 0 and line["code"] for line in calls)
    refused = [line for line in lines if line.get("logger") == "lookonce.audit" and line["event"] == "call refused"]
    assert any(line["reason"] == "unauthenticated" for line in refused)


def test_a_client_cannot_be_served_before_other_tenants(guarded: Guarded) -> None:
    with guarded.client("acme") as client:
        with pytest.raises(InvalidParameterError) as caught:
            client.generate("what?", priority=-1, max_tokens=1)
        assert caught.value.field == "priority"
        assert client.generate("what?", priority=1, max_tokens=1).token_ids
