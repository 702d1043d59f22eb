"""The SDK's client of operators' calls for synchronous code; `lookonce.admin.aio` has the same for asyncio.

with lookonce.AdminClient.connect("127.0.0.1:50052", token=token) as admin:
    admin.evict(["cat.png"])
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
from lookonce.sdk.calls import SyncCalls
from lookonce.sdk.connection.channel import ConnectionOptions, connection_options
from lookonce.sdk.connection.target import checked_target
from lookonce.sdk.connection.tokens import Token
from lookonce.sdk.connections import open_channel


class AdminClient:
    """A connection to the operators' calls of one server (its `admin_listen`). Thread-safe.

    Calls about images are an encoder's, those about adapters a decoder's.

    Images are references, bytes, or paths of files; only their digests are sent. `tenant` is the owner of the images;
    empty: the default tenant. `timeout_s` is the deadline of a call, seconds; None: the client's default.

    Every method raises UnauthenticatedError without an accepted token; PermissionDeniedError for a token without the
    role operator; UnavailableError if the server or the shared cache does not answer, or changes its primary: call
    again; CacheAccessError if the shared cache refuses the encoder's user a command: calling again does not help;
    DeadlineError; and UnsupportedError if the target does not serve operators' calls.
    """

    def __init__(self, target: str, options: ConnectionOptions) -> None:
        """Opens the channel. Call `connect` instead."""
        self._calls = SyncCalls(options)
        self._channel = open_channel(target, None, options)
        self._stub: pb_grpc.EncoderAdminServiceStub = pb_grpc.EncoderAdminServiceStub(self._channel)
        self._decoder: decoder_pb_grpc.DecoderAdminServiceStub = decoder_pb_grpc.DecoderAdminServiceStub(self._channel)

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
        """Returns a client. It connects at the first call, which raises UnavailableError if the server is not reached.

        `target` is the host:port of a server's `admin_listen`: for images, of any encoder of a fleet; for adapters, of
        the decoder that shall load or free them. `token` needs the role operator. The other arguments are those of
        `lookonce.Client.connect`.
        """
        options = connection_options(
            timeout_s, tls_ca, tls_cert, tls_key, token, token_over_plaintext=token_over_plaintext
        )
        return cls(checked_target(target), options)

    def evict(
        self, images: Sequence[ImageLike], *, tenant: str = "", timeout_s: float | None = None
    ) -> list[EvictedImage]:
        """Removes images from every cache: the shared one, all encoders, all decoders. Returns one result per image.

        All entries of an image go, whatever their encoder and options, and all entries of video frames with it. After
        the call the shared cache and this encoder have none of its rows. Other processes drop theirs as soon as they
        receive the message, usually within milliseconds. An image that no cache has is no error. Removes 256 images per
        request: after an error, call again with all of them.
        """
        deadline = self._calls.deadline(timeout_s)
        with tracing.calling("admin.evict"):
            results: list[EvictedImage] = []
            for chunk, request in eviction_requests(as_images(images), tenant):
                results += evicted_images(chunk, self._calls.unary(self._stub.EvictEmbeddings, request, deadline))
            return results

    def evict_tenant(self, tenant: str, *, timeout_s: float | None = None) -> int:
        """Removes all images of a tenant as `evict` does. Returns the number of entries that the shared cache had."""
        with tracing.calling("admin.evict_tenant"):
            request = pb.EvictEmbeddingsRequest(tenant=checked_tenant(tenant), all_of_tenant=True)
            return self._calls.unary(self._stub.EvictEmbeddings, request, self._calls.deadline(timeout_s)).evicted

    def evict_all(self, *, timeout_s: float | None = None) -> int:
        """Removes all images of this encoder's model, of all tenants. Returns as `evict_tenant`."""
        with tracing.calling("admin.evict_all"):
            request = pb.EvictEmbeddingsRequest(all=True)
            return self._calls.unary(self._stub.EvictEmbeddings, request, self._calls.deadline(timeout_s)).evicted

    def pin(
        self, images: Sequence[ImageLike], *, tenant: str = "", unpin: bool = False, timeout_s: float | None = None
    ) -> list[bool]:
        """Keeps the images' rows in the shared cache until they are unpinned or removed; `unpin` lets them expire.

        Returns for each image whether the shared cache has it. Pins hold under memory pressure only with a cache server
        whose eviction policy is a "volatile" one.
        """
        deadline = self._calls.deadline(timeout_s)
        with tracing.calling("admin.pin"):
            refs = as_images(images)
            found = [False] * len(refs)
            for indexes, selection in selections(refs, tenant):
                request = pb.PinEmbeddingsRequest(selection=selection, unpin=unpin)
                response = self._calls.unary(self._stub.PinEmbeddings, request, deadline)
                for index, was_found in zip(indexes, response.found, strict=True):
                    found[index] = was_found
            return found

    def prewarm(self, images: Sequence[ImageLike], *, tenant: str = "", timeout_s: float | None = None) -> list[bool]:
        """Copies rows from the shared cache into this encoder. Returns for each image whether this encoder has it now.

        To encode images that no cache has, use `lookonce.Client.encode`.
        """
        deadline = self._calls.deadline(timeout_s)
        with tracing.calling("admin.prewarm"):
            refs = as_images(images)
            found = [False] * len(refs)
            for indexes, selection in selections(refs, tenant):
                request = pb.PrewarmEmbeddingsRequest(selection=selection)
                response = self._calls.unary(self._stub.PrewarmEmbeddings, request, deadline)
                for index, was_found in zip(indexes, response.found, strict=True):
                    found[index] = was_found
            return found

    def describe(
        self, images: Sequence[ImageLike], *, tenant: str = "", timeout_s: float | None = None
    ) -> list[EntryStats]:
        """Returns the state of each image's rows in the shared cache and in this encoder."""
        deadline = self._calls.deadline(timeout_s)
        with tracing.calling("admin.describe"):
            refs = as_images(images)
            found: dict[int, EntryStats] = {}
            for indexes, selection in selections(refs, tenant):
                request = pb.DescribeEmbeddingsRequest(selection=selection)
                response = self._calls.unary(self._stub.DescribeEmbeddings, request, deadline)
                for index, result in zip(indexes, response.results, strict=True):
                    found[index] = entry_stats(refs[index], result)
            return [found[index] for index in range(len(refs))]

    def stats(self, *, timeout_s: float | None = None) -> CacheStats:
        """Returns the counters of this encoder's cache and of the shared cache. Scans all names in the shared cache."""
        with tracing.calling("admin.stats"):
            request = pb.GetCacheStatsRequest()
            return cache_stats(self._calls.unary(self._stub.GetCacheStats, request, self._calls.deadline(timeout_s)))

    def load_adapter(self, name: str, *, timeout_s: float | None = None) -> list[str]:
        """Loads the LoRA adapter in the folder `name` of the decoder's `adapters_folder`. Returns all that are served.

        Raises InvalidParameterError for an adapter that cannot be served, and if the name has another content there.
        """
        with tracing.calling("admin.load_adapter"):
            request = decoder_pb.LoadAdapterRequest(name=name)
            deadline = self._calls.deadline(timeout_s)
            return list(self._calls.unary(self._decoder.LoadAdapter, request, deadline).adapters)

    def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> list[str]:
        """Frees an adapter when its last request has ended. Returns all that are served then.

        Raises InvalidParameterError for a name that is not served. If the call ends first, the adapter is served again.
        """
        with tracing.calling("admin.unload_adapter"):
            request = decoder_pb.UnloadAdapterRequest(name=name)
            deadline = self._calls.deadline(timeout_s)
            return list(self._calls.unary(self._decoder.UnloadAdapter, request, deadline).adapters)

    def close(self) -> None:
        """Closes the channel. Calls in flight end with AbortedError; so do later calls."""
        self._calls.close()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
