"""The SDK's client of operators' calls for asyncio, with the methods of `lookonce.admin.client`.

async with lookonce.AsyncAdminClient.connect("127.0.0.1:50052", token=token) as admin:
    await admin.evict(["cat.png"])
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Self

from lookonce import tracing
from lookonce.admin.messages import (
    cache_stats,
    checked_tenant,
    entry_stats,
    evicted_images,
    eviction_requests,
    selections,
)
from lookonce.admin.results import CacheStats, EntryStats, EvictedImage
from lookonce.decoder.v1 import decoder_service_pb2 as decoder_pb
from lookonce.decoder.v1 import decoder_service_pb2_grpc as decoder_pb_grpc
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1 import encoder_service_pb2_grpc as pb_grpc
from lookonce.images import ImageLike, as_images
from lookonce.sdk.calls import AsyncCalls
from lookonce.sdk.connection.channel import ConnectionOptions, connection_options
from lookonce.sdk.connection.lazy_channel import LazyChannel
from lookonce.sdk.connection.target import checked_target
from lookonce.sdk.connection.tokens import Token
from lookonce.sdk.in_threads import readers, run_until


class AsyncAdminClient:
    """A connection to the operators' calls of one server (its `admin_listen`).

    It belongs to the event loop of its first call, and may be made before there is one.
    Arguments, results and errors are those of `lookonce.AdminClient`. Reads and hashes files in threads.
    """

    def __init__(self, target: str, options: ConnectionOptions) -> None:
        """Opens nothing yet. Call `connect` instead."""
        self._calls = AsyncCalls(options)
        self._channel = LazyChannel(target, None, options)

    @classmethod
    def connect(
        cls,
        target: str,
        *,
        timeout_s: float | None = 60.0,
        tls_ca: str | os.PathLike[str] | None = None,
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        token: Token | None = None,
        token_over_plaintext: bool = False,
    ) -> Self:
        """Returns a client. The arguments are those of `lookonce.AdminClient.connect`."""
        options = connection_options(
            timeout_s, tls_ca, tls_cert, tls_key, token, token_over_plaintext=token_over_plaintext
        )
        return cls(checked_target(target), options)

    @property
    def _stub(self) -> pb_grpc.EncoderAdminServiceAsyncStub:
        self._calls.check_open()
        stub: pb_grpc.EncoderAdminServiceAsyncStub = pb_grpc.EncoderAdminServiceStub(self._channel.opened())
        return stub

    @property
    def _decoder(self) -> decoder_pb_grpc.DecoderAdminServiceAsyncStub:
        self._calls.check_open()
        stub: decoder_pb_grpc.DecoderAdminServiceAsyncStub = decoder_pb_grpc.DecoderAdminServiceStub(
            self._channel.opened()
        )
        return stub

    async def load_adapter(self, name: str, *, timeout_s: float | None = None) -> list[str]:
        """Loads a LoRA adapter into a decoder; see `lookonce.AdminClient.load_adapter`."""
        with tracing.calling("admin.load_adapter"):
            request = decoder_pb.LoadAdapterRequest(name=name)
            deadline = self._calls.deadline(timeout_s)
            return list((await self._calls.unary(self._decoder.LoadAdapter, request, deadline)).adapters)

    async def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> list[str]:
        """Frees an adapter of a decoder; see `lookonce.AdminClient.unload_adapter`."""
        with tracing.calling("admin.unload_adapter"):
            request = decoder_pb.UnloadAdapterRequest(name=name)
            deadline = self._calls.deadline(timeout_s)
            return list((await self._calls.unary(self._decoder.UnloadAdapter, request, deadline)).adapters)

    async def evict(
        self, images: Sequence[ImageLike], *, tenant: str = "", timeout_s: float | None = None
    ) -> list[EvictedImage]:
        """Removes images from every cache; see `lookonce.AdminClient.evict`."""
        deadline = self._calls.deadline(timeout_s)
        with tracing.calling("admin.evict"):
            results: list[EvictedImage] = []
            for chunk, request in eviction_requests(await run_until(deadline, readers(), as_images, images), tenant):
                results += evicted_images(chunk, await self._calls.unary(self._stub.EvictEmbeddings, request, deadline))
            return results

    async def evict_tenant(self, tenant: str, *, timeout_s: float | None = None) -> int:
        """Removes all images of a tenant as `evict` does. Returns the number of entries that the shared cache had."""
        with tracing.calling("admin.evict_tenant"):
            request = pb.EvictEmbeddingsRequest(tenant=checked_tenant(tenant), all_of_tenant=True)
            return (
                await self._calls.unary(self._stub.EvictEmbeddings, request, self._calls.deadline(timeout_s))
            ).evicted

    async def evict_all(self, *, timeout_s: float | None = None) -> int:
        """Removes all images of this encoder's model, of all tenants. Returns as `evict_tenant`."""
        with tracing.calling("admin.evict_all"):
            request = pb.EvictEmbeddingsRequest(all=True)
            return (
                await self._calls.unary(self._stub.EvictEmbeddings, request, self._calls.deadline(timeout_s))
            ).evicted

    async def pin(
        self, images: Sequence[ImageLike], *, tenant: str = "", unpin: bool = False, timeout_s: float | None = None
    ) -> list[bool]:
        """Pins images, or unpins them; see `lookonce.AdminClient.pin`."""
        deadline = self._calls.deadline(timeout_s)
        with tracing.calling("admin.pin"):
            refs = await run_until(deadline, readers(), as_images, images)
            found = [False] * len(refs)
            for indexes, selection in selections(refs, tenant):
                request = pb.PinEmbeddingsRequest(selection=selection, unpin=unpin)
                response = await self._calls.unary(self._stub.PinEmbeddings, request, deadline)
                for index, was_found in zip(indexes, response.found, strict=True):
                    found[index] = was_found
            return found

    async def prewarm(
        self, images: Sequence[ImageLike], *, tenant: str = "", timeout_s: float | None = None
    ) -> list[bool]:
        """Copies rows from the shared cache into this encoder; see `lookonce.AdminClient.prewarm`."""
        deadline = self._calls.deadline(timeout_s)
        with tracing.calling("admin.prewarm"):
            refs = await run_until(deadline, readers(), as_images, images)
            found = [False] * len(refs)
            for indexes, selection in selections(refs, tenant):
                request = pb.PrewarmEmbeddingsRequest(selection=selection)
                response = await self._calls.unary(self._stub.PrewarmEmbeddings, request, deadline)
                for index, was_found in zip(indexes, response.found, strict=True):
                    found[index] = was_found
            return found

    async def describe(
        self, images: Sequence[ImageLike], *, tenant: str = "", timeout_s: float | None = None
    ) -> list[EntryStats]:
        """Returns the state of each image's rows in the shared cache and in this encoder."""
        deadline = self._calls.deadline(timeout_s)
        with tracing.calling("admin.describe"):
            refs = await run_until(deadline, readers(), as_images, images)
            found: dict[int, EntryStats] = {}
            for indexes, selection in selections(refs, tenant):
                request = pb.DescribeEmbeddingsRequest(selection=selection)
                response = await self._calls.unary(self._stub.DescribeEmbeddings, request, deadline)
                for index, result in zip(indexes, response.results, strict=True):
                    found[index] = entry_stats(refs[index], result)
            return [found[index] for index in range(len(refs))]

    async def stats(self, *, timeout_s: float | None = None) -> CacheStats:
        """Returns the counters of this encoder's cache and of the shared cache. Scans all names in the shared cache."""
        with tracing.calling("admin.stats"):
            request = pb.GetCacheStatsRequest()
            return cache_stats(
                await self._calls.unary(self._stub.GetCacheStats, request, self._calls.deadline(timeout_s))
            )

    async def aclose(self) -> None:
        """Closes the channel. Calls in flight end with AbortedError; so do later calls."""
        self._calls.close()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
