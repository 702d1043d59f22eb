"""Interceptors of the caller's own see every attempt of every call, and change nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

import lookonce
from lookonce.errors import InvalidParameterError, UnavailableError
from tests.lookonce.sdk.sdk_servers import running_system

FIRST = ["GetModelInfo", "LookupEmbeddings", "GetEncoderInfo", "Encode"]


class Notes(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    def __init__(self) -> None:
        self.methods: list[str] = []

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        self.methods.append(client_call_details.method.rpartition("/")[2])
        return continuation(client_call_details, request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return self.intercept_unary_unary(continuation, client_call_details, request)


class _AsyncUnary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, methods: list[str]) -> None:
        self.methods = methods

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        self.methods.append(str(client_call_details.method, "ascii").rpartition("/")[2])
        return await continuation(client_call_details, request)


class _AsyncStream(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, methods: list[str]) -> None:
        self.methods = methods

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        self.methods.append(str(client_call_details.method, "ascii").rpartition("/")[2])
        return await continuation(client_call_details, request)


async def test_an_asyncio_client() -> None:
    methods: list[str] = []
    interceptors = [_AsyncUnary(methods), _AsyncStream(methods)]
    async with (
        running_system() as system,
        lookonce.AsyncClient.connect(system.decoder_target, interceptors=interceptors) as client,
    ):
        await client.encode([b"a picture"])
        assert methods == FIRST
        system.decoder.failures = [UnavailableError("gone")]
        assert (await client.generate("hello", max_tokens=1)).text == "hello +0"
        assert methods[4:] == ["Generate", "Generate"]
        async with client.stream("a b c") as stream:
            text = "".join([piece async for piece in stream])
        assert text == "a b c +0"
        system.decoder.failures = [InvalidParameterError("x", "is wrong")]
        with pytest.raises(InvalidParameterError):
            await client.generate("hello")
        ended = client.stream("a b c")
        await anext(ended)
        await ended.aclose()
        waiting = asyncio.create_task(client.generate("hello"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_a_synchronous_client() -> None:
    notes = Notes()
    async with running_system() as system:

        def use() -> None:
            with lookonce.Client.connect(system.decoder_target, interceptors=[notes]) as client:
                client.encode([b"a picture"])
                assert notes.methods == FIRST
                system.decoder.failures = [UnavailableError("gone")]
                assert client.generate("hello", max_tokens=1).text == "hello +0"
                assert "".join(client.stream("a b c")) == "a b c +0"
                assert notes.methods[4:] == ["Generate", "Generate", "GenerateStream"]
                system.decoder.failures = [InvalidParameterError("x", "is wrong")]
                with pytest.raises(InvalidParameterError):
                    client.generate("hello")
                client.wait_until_ready(timeout_s=30.0)

        await asyncio.to_thread(use)
