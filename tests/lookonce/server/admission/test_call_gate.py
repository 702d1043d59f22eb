"""Every call except health needs a token, and its identity is the one of the token."""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry

from lookonce.decoder.v1 import decoder_service_pb2
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1 import encoder_service_pb2_grpc as pb_grpc
from lookonce.errors import UnsupportedError
from lookonce.identity import ANYBODY, TENANT_KEY, current_identity
from lookonce.server.admission.quotas import load_quotas
from lookonce.server.service_entry import ServiceEntry
from lookonce.server.serving import GrpcService
from lookonce.server.settings import ServiceSettings
from lookonce.server.telemetry import Telemetry
from tests.lookonce.server.serving_program import UnsupportedEncoder

TOKENS = {"client": "token-of-acme", "service": "token-of-decoders", "operator": "token-of-operators"}
LOCAL = [("grpc.use_local_subchannel_pool", 1)]
NAMES = ["lookonce.encoder.v1.EncoderService", "lookonce.encoder.v1.EncoderAdminService"]


class WhoEncoder(UnsupportedEncoder):
    """An encoder whose GetEncoderInfo returns the caller's identity."""

    async def GetEncoderInfo(self, request: pb.GetEncoderInfoRequest, context: Any) -> pb.GetEncoderInfoResponse:
        identity = current_identity()
        return pb.GetEncoderInfoResponse(model=f"{identity.name}/{identity.tenant}/{identity.role.value}")


class Admin(pb_grpc.EncoderAdminServiceServicer):
    """An admin service that answers GetCacheStats only."""

    async def GetCacheStats(self, request: Any, context: Any) -> pb.GetCacheStatsResponse:
        return pb.GetCacheStatsResponse()

    async def DescribeEmbeddings(self, request: Any, context: Any) -> pb.DescribeEmbeddingsResponse:
        raise UnsupportedError("not here")

    async def PinEmbeddings(self, request: Any, context: Any) -> pb.PinEmbeddingsResponse:
        raise UnsupportedError("not here")

    async def PrewarmEmbeddings(self, request: Any, context: Any) -> pb.PrewarmEmbeddingsResponse:
        raise UnsupportedError("not here")

    async def EvictEmbeddings(self, request: Any, context: Any) -> pb.EvictEmbeddingsResponse:
        raise UnsupportedError("not here")


class Server:
    """A guarded server and channels to its addresses."""

    def __init__(self, service: GrpcService, channel: grpc.aio.Channel, admin_channel: grpc.aio.Channel) -> None:
        self.service, self.channel, self.admin_channel = service, channel, admin_channel

    async def who(self, *metadata: tuple[str, str]) -> str:
        """Returns the identity that the server gives the caller."""
        stub: pb_grpc.EncoderServiceAsyncStub = pb_grpc.EncoderServiceStub(self.channel)
        return str((await stub.GetEncoderInfo(pb.GetEncoderInfoRequest(), metadata=metadata, timeout=10)).model)

    async def methods(self, *metadata: tuple[str, str]) -> list[str]:
        """Returns all methods that reflection knows, as "/package.Service/Method"."""
        found = []
        stub = reflection_pb2_grpc.ServerReflectionStub(self.admin_channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        async for response in stub.ServerReflectionInfo(iter(asked), metadata=metadata, timeout=10):
            for service in response.list_services_response.service:
                found += [f"/{service.name}/{method}" for method in METHODS.get(service.name, ())]
        return found


def _methods() -> dict[str, list[str]]:
    files = [
        pb.DESCRIPTOR,
        decoder_service_pb2.DESCRIPTOR,
        health_pb2.DESCRIPTOR,
        reflection_pb2.DESCRIPTOR,
    ]
    services = [service for file in files for service in file.services_by_name.values()]
    return {service.full_name: [method.name for method in service.methods] for service in services}


METHODS = _methods()


def bearer(role: str) -> tuple[str, str]:
    return "authorization", f"Bearer {TOKENS[role]}"


@pytest.fixture
async def server(tmp_path: pathlib.Path) -> AsyncIterator[Server]:
    async with running(tmp_path) as server:
        yield server


@contextlib.asynccontextmanager
async def running(folder: pathlib.Path, **values: Any) -> AsyncIterator[Server]:
    text = "".join(
        f'[[tokens]]\nname = "{role}-1"\nrole = "{role}"\ntenant = "{"acme" if role == "client" else ""}"\n'
        f'sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n'
        for role, token in TOKENS.items()
    )
    (folder / "tokens.toml").write_text(text)
    settings = ServiceSettings(
        model=folder,
        auth_tokens_file=folder / "tokens.toml",
        admin_listen="127.0.0.1:0",
        health_listen="127.0.0.1:0",
        drain_timeout_s=0.0,
        **values,
    )
    quotas = load_quotas(settings, CollectorRegistry())
    encoder = ServiceEntry(NAMES[0], lambda server: pb_grpc.add_EncoderServiceServicer_to_server(WhoEncoder(), server))
    admin = ServiceEntry(NAMES[1], lambda server: pb_grpc.add_EncoderAdminServiceServicer_to_server(Admin(), server))
    service = GrpcService(settings, Telemetry.from_settings(settings), [encoder], admin_services=[admin], quotas=quotas)
    await service.start()
    async with (
        grpc.aio.insecure_channel(service.target, options=LOCAL) as channel,
        grpc.aio.insecure_channel(str(service.admin_target), options=LOCAL) as admin_channel,
    ):
        yield Server(service, channel, admin_channel)
    await service.stop()


async def code_of(channel: grpc.aio.Channel, method: str, *metadata: tuple[str, str]) -> grpc.StatusCode:
    """Returns the status code of a call with an empty message; OK if it is answered.

    Every kind of method takes such a call. A client of grpc.aio that streams its requests would report INTERNAL, an
    error of its own, when the server refuses the call while the client still sends.
    """
    method_call: Any = channel.unary_stream(method)
    call = method_call(b"", metadata=metadata, timeout=10)
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            call.cancel()
            return grpc.StatusCode.OK
    code: grpc.StatusCode = await call.code()
    return code


async def test_without_a_token_every_method_is_refused(server: Server) -> None:
    methods = await server.methods(bearer("operator"))
    assert len(methods) >= 11
    for method in methods:
        channel = server.admin_channel if "Admin" in method or "reflection" in method else server.channel
        if "Health" in method:
            continue
        for metadata in [(), (("authorization", "Bearer wrong"),), (("authorization", TOKENS["client"]),)]:
            assert await code_of(channel, method, *metadata) is grpc.StatusCode.UNAUTHENTICATED, method


async def test_an_operator_describes_a_service_by_reflection_and_others_do_not(server: Server) -> None:
    """The exchange that grpcurl has: it tries version 1 first, and takes v1alpha if that is not implemented."""
    newer = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    assert await code_of(server.admin_channel, newer, bearer("operator")) is grpc.StatusCode.UNIMPLEMENTED
    stub = reflection_pb2_grpc.ServerReflectionStub(server.admin_channel)
    asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAMES[1])
    call = stub.ServerReflectionInfo(iter([asked]), metadata=(bearer("operator"),), timeout=10)
    files = (await anext(aiter(call))).file_descriptor_response.file_descriptor_proto
    services = [service for file in files for service in FileDescriptorProto.FromString(file).service]
    assert {method.name for service in services for method in service.method} >= {"EvictEmbeddings", "GetCacheStats"}
    for metadata, code in (
        ((), grpc.StatusCode.UNAUTHENTICATED),
        ((bearer("client"),), grpc.StatusCode.PERMISSION_DENIED),
        ((bearer("service"),), grpc.StatusCode.PERMISSION_DENIED),
    ):
        refused = stub.ServerReflectionInfo(metadata=metadata, timeout=10)
        assert await refused.code() is code


async def test_health_asks_for_nothing_on_both_addresses(server: Server) -> None:
    assert server.service.health_target is not None
    async with grpc.aio.insecure_channel(server.service.health_target, options=LOCAL) as probe:
        for channel in (server.channel, probe):
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=NAMES[0]), timeout=10)
            assert answer.status in (health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=NAMES[0]), timeout=10)
            assert await anext(aiter(watch)) is not None
            watch.cancel()
        code = await code_of(probe, f"/{NAMES[0]}/GetEncoderInfo", bearer("operator"))
        assert code is grpc.StatusCode.UNIMPLEMENTED, "nothing else is there"


async def test_the_identity_of_a_call_is_the_one_of_its_token(server: Server) -> None:
    assert await server.who(bearer("client")) == "client-1/acme/client"
    assert await server.who(("authorization", f"bEARER   {TOKENS['client']}")) == "client-1/acme/client"
    assert await server.who(bearer("service")) == "service-1//service"


async def test_several_authorization_headers_are_refused_whichever_comes_first(server: Server) -> None:
    wrong = ("authorization", "Bearer wrong")
    for metadata in [(bearer("client"), wrong), (wrong, bearer("client")), (bearer("client"), bearer("client"))]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.who(*metadata)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "2 authorization headers" in str(caught.value.details())


async def test_several_tenants_in_one_call_are_refused(server: Server) -> None:
    method, tenants = f"/{NAMES[0]}/GetEncoderInfo", ((TENANT_KEY, "one"), (TENANT_KEY, "two"))
    assert await code_of(server.channel, method, bearer("service"), *tenants) is grpc.StatusCode.INVALID_ARGUMENT
    assert await server.who(bearer("client"), *tenants) == "client-1/acme/client", "clients name no tenant"


async def test_only_services_and_operators_say_for_which_tenant_they_call(server: Server) -> None:
    other = (TENANT_KEY, "other")
    assert await server.who(bearer("client"), other) == "client-1/acme/client"
    assert await server.who(bearer("service"), other) == "service-1/other/service"
    assert await server.who(bearer("operator"), other) == "operator-1/other/operator"
    code = await code_of(server.channel, f"/{NAMES[0]}/GetEncoderInfo", bearer("service"), (TENANT_KEY, "../x"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_operators_calls_are_for_operators(server: Server) -> None:
    method = f"/{NAMES[1]}/GetCacheStats"
    codes = [await code_of(server.admin_channel, method, bearer(role)) for role in TOKENS]
    assert codes == [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.OK]
    assert await code_of(server.channel, method, bearer("operator")) is grpc.StatusCode.UNIMPLEMENTED


async def test_outside_of_a_call_there_is_no_identity(server: Server) -> None:
    await server.who(bearer("client"))
    assert current_identity() == ANYBODY


async def test_a_tenant_over_its_quota_is_advised_when_to_retry(tmp_path: pathlib.Path) -> None:
    quotas = tmp_path / "quotas.toml"
    quotas.write_text("[tenants.acme]\nrequests_per_s = 0.05\n")
    async with running(tmp_path, quotas_file=quotas) as server:
        await server.who(bearer("client"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.who(bearer("client"))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(caught.value)
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details if detail.Is(retry.DESCRIPTOR))
        assert 0 < retry.retry_delay.ToSeconds() <= 20
        assert await server.who(bearer("service"), (TENANT_KEY, "acme")) == "service-1/acme/service"
