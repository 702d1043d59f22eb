"""The decoder's client of the encoder service: describes the service, encodes images, looks them up, reads their rows.

Every call has a deadline. Every failure is a LookonceError whose text may be shown to a client: addresses and gRPC's
own messages go to the log only. Call all methods on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from decoder_svc.rows.encoder_channel import ChannelSettings, EncoderChannel
from decoder_svc.rows.encoder_info import EncoderInfo, ExpectedRows, checked_info
from decoder_svc.rows.encoder_wire import (
    SENDER,
    check_key,
    embedding_meta,
    looked_up,
    wire_key,
    wire_options,
    without_position,
)
from decoder_svc.rows.own_fingerprints import OwnFingerprints
from decoder_svc.rows.reach_log import ReachLog
from decoder_svc.rows.row_stream import RowStreamReader
from lookonce import tracing
from lookonce.common.v1 import common_pb2
from lookonce.content_key import ContentKey, ProcessorOptions
from lookonce.embedding_meta import EmbeddingMeta
from lookonce.encoder.v1 import encoder_service_pb2, encoder_service_pb2_grpc
from lookonce.errors import FingerprintMismatchError, LookonceError, UnavailableError
from lookonce.identity import REQUEST_ID_KEY, TENANT_KEY, current_identity
from lookonce.image_file import ImageFile, files_of
from lookonce.sdk.replies import parsed
from lookonce.server.encoder_health import ENCODER_SERVICE, health_name
from lookonce.server.telemetry import current_request_id

MAX_LOOKUP_KEYS = 256
"""Most keys of one call of `lookup` or `touch`, by the encoder's contract."""

_INFO_TIMEOUT_S = 5.0
_LOOKUP_TIMEOUT_S = 5.0
# Replicas that are asked, in turn, for one that belongs to the folder.
_MAX_REPLICAS_ASKED = 16
# A proxy may route by this header, so that calls about one image reach one encoder (k8s/components/affinity).
_DIGEST_KEY = "x-lookonce-digest"

ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image whose rows exist."""

    meta: EmbeddingMeta
    # Whether the shared cache has the rows. If not, `read_rows` can read them for a short time.
    stored: bool
    # Whether the rows were encoded for this call. False also for a call that joined another one's encode.
    was_computed: bool
    # All rows, if the shared cache does not have them and they fit into a message; else None.
    rows: bytes | None = field(default=None, repr=False)


class EncoderClient:
    """A client for the encoder replicas behind one gRPC target that belong to this decoder's model folder.

    During a roll-out, replicas of another model revision are behind the same target. No call goes to them.
    """

    def __init__(
        self, target: str, expected: ExpectedRows, settings: ChannelSettings, own: OwnFingerprints | None = None
    ) -> None:
        """`target` is a gRPC target such as dns:///encoder:50051. Connects on first use.

        `own` None trusts every encoder that makes the expected rows.
        """
        self._target = target
        self._expected = expected
        self._own = own
        self._settings = settings
        self._reach = ReachLog()
        # By health name.
        self._channels: dict[str, EncoderChannel] = {}
        # The channel in use; the one to all replicas until one is found that belongs to the folder.
        self._channel = self._channel_to(ENCODER_SERVICE)
        self._stub_channel = self._channel.current()
        self._current_stub: encoder_service_pb2_grpc.EncoderServiceAsyncStub = (
            encoder_service_pb2_grpc.EncoderServiceStub(self._stub_channel)
        )
        self._info: EncoderInfo | None = None
        # Whether the replicas in use may have been replaced by others, since a call did not reach any.
        self._is_in_doubt = False
        # Whether replicas answered, but all of other models.
        self._has_only_strangers = False
        # The GetEncoderInfo call in flight; all callers share its result or failure.
        self._asking: asyncio.Task[EncoderInfo] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channels; calls in flight fail with UnavailableError."""
        for channel in self._channels.values():
            await channel.close()
        if self._asking is not None:
            await asyncio.wait({self._asking})

    @property
    def has_only_strangers(self) -> bool:
        """Whether all replicas that answered when last asked have other models than this decoder."""
        return self._has_only_strangers

    @property
    def _stub(self) -> encoder_service_pb2_grpc.EncoderServiceAsyncStub:
        channel = self._channel.current()
        if channel is not self._stub_channel:
            self._stub_channel, self._current_stub = channel, encoder_service_pb2_grpc.EncoderServiceStub(channel)
        return self._current_stub

    async def info(self) -> EncoderInfo:
        """Returns the encoder's description. Asks once, and again after a call failed.

        Raises FingerprintMismatchError if its rows do not fit this decoder's model, UnavailableError if it cannot be
        reached.
        """
        if self._info is not None:
            if self._is_in_doubt and self._asking is None:
                self._begin_asking()
            return self._info
        # Shielded: cancelling one caller must not cancel the call for the others.
        return await asyncio.shield(self._asking or self._begin_asking())

    def _begin_asking(self) -> asyncio.Task[EncoderInfo]:
        self._asking = asyncio.create_task(self._ask_info())
        self._asking.add_done_callback(self._note_asked)
        return self._asking

    async def _ask_info(self) -> EncoderInfo:
        """Finds a replica that belongs to the folder, and uses the channel to its like."""
        if self._own is None:
            return checked_info(await self._described(self._channel), self._expected)
        usual = self._channel_to(health_name(self._own.fingerprint))
        try:
            info = checked_info(await self._described(usual), self._expected)
        except UnavailableError:
            return await self._found_among_all(self._own)
        self._channel = usual
        return info

    async def _found_among_all(self, own: OwnFingerprints) -> EncoderInfo:
        """Asks one replica after the other. Those with other element types have other fingerprints."""
        everybody = self._channel_to(ENCODER_SERVICE)
        stranger = FingerprintMismatchError("")
        for _ in range(_MAX_REPLICAS_ASKED):
            try:
                info = checked_info(await self._described(everybody), self._expected)
            except FingerprintMismatchError as error:
                stranger = error
                continue
            if not await own.include(info.fingerprint, info.dtype):
                stranger = FingerprintMismatchError(
                    f"the encoder service has other vision weights (fingerprint {info.fingerprint[:16]}…) than this "
                    f"decoder's model folder ({own.fingerprint[:16]}…); start an encoder with the same folder"
                )
                continue
            self._channel = await self._channel_to_like(info, everybody)
            return info
        raise stranger

    async def _channel_to_like(self, info: EncoderInfo, everybody: EncoderChannel) -> EncoderChannel:
        """Returns the channel to replicas with this fingerprint; encoders of older releases have none."""
        channel = self._channel_to(health_name(info.fingerprint))
        try:
            # The channel may be waiting to connect again to a replica that has just started.
            await self._described(channel, wait_for_ready=True)
        except UnavailableError:
            return everybody
        return channel

    async def _described(
        self, channel: EncoderChannel, *, wait_for_ready: bool = False
    ) -> encoder_service_pb2.GetEncoderInfoResponse:
        stub: encoder_service_pb2_grpc.EncoderServiceAsyncStub = encoder_service_pb2_grpc.EncoderServiceStub(
            channel.current()
        )
        request = encoder_service_pb2.GetEncoderInfoRequest()
        try:
            reply = await stub.GetEncoderInfo(
                request, timeout=_INFO_TIMEOUT_S, metadata=self._metadata(), wait_for_ready=wait_for_ready
            )
        except grpc.aio.AioRpcError as error:
            is_expected = channel is not self._channels[ENCODER_SERVICE]
            raise self._reach.error_of(error, _INFO_TIMEOUT_S, is_expected=is_expected) from None
        self._reach.note_answer()
        return parsed(reply, SENDER)

    def _channel_to(self, name: str) -> EncoderChannel:
        if name not in self._channels:
            self._channels[name] = EncoderChannel(self._target, self._settings, name)
        return self._channels[name]

    def _note_asked(self, asking: asyncio.Task[EncoderInfo]) -> None:
        self._asking = None
        if asking.cancelled():
            return
        # Retrieving the exception also keeps asyncio from logging it if every caller was cancelled.
        error = asking.exception()
        self._has_only_strangers = isinstance(error, FingerprintMismatchError)
        if error is None:
            self._info, self._is_in_doubt = asking.result(), False

    async def encode(
        self,
        key: ContentKey,
        data: ImageFile | None,
        options: ProcessorOptions,
        timeout_s: float,
        *,
        refresh: bool = False,
        removal_token: bytes | None = None,
    ) -> EncodedImage:
        """Makes sure that the image's rows exist, and encodes them if they do not.

        `refresh` forces a new encode of `data` even if a cache has the rows. `removal_token`: the one of the last
        removal that was heard of when the image arrived here.

        Raises EmbeddingNotCachedError without `data` if no cache has the rows; the encoder's own error for a bad image;
        else UnavailableError, OverloadedError or FingerprintMismatchError.
        """
        policy = encoder_service_pb2.CACHE_POLICY_REFRESH if refresh else encoder_service_pb2.CACHE_POLICY_UNSPECIFIED
        request = encoder_service_pb2.EncodeRequest(
            cache_policy=policy, expected_encoder_fingerprint=key.fingerprint, removal_token=removal_token
        )
        # Filled in place: assigning a message to a field of another one copies it, including the image bytes.
        image = request.items.add(image=common_pb2.ImageSource(**wire_options(options)), rows_if_not_stored=True).image
        if data is None:
            image.key.CopyFrom(wire_key(key))
        else:
            image.data, *others = files_of(data)
            for other in others:
                image.second_frame = other
            image.expected_digest = key.digest
        result = await self._encode(key, request, timeout_s)
        was_computed = result.source == encoder_service_pb2.RESULT_SOURCE_COMPUTED
        meta = embedding_meta(result.embedding)
        if result.rows and len(result.rows) != meta.size_bytes:
            raise UnavailableError("the encoder service sent rows of another size than it announced; retry")
        return EncodedImage(meta, result.stored, was_computed, result.rows or None)

    async def lookup(self, keys: Sequence[ContentKey], options: ProcessorOptions) -> list[EmbeddingMeta | None]:
        """Returns the shape of each image's rows without encoding it; None for one that the encoder does not know.

        Takes at most MAX_LOOKUP_KEYS keys. A proxy may route a call about a single image by its digest.
        """
        request = encoder_service_pb2.LookupEmbeddingsRequest(
            keys=[wire_key(key) for key in keys], **wire_options(options)
        )
        metadata = self._metadata(keys[0] if len(keys) == 1 else None)
        response = await self._answer(self._stub.LookupEmbeddings, request, _LOOKUP_TIMEOUT_S, metadata)
        if len(response.results) != len(keys):
            raise UnavailableError("the encoder service answered for another number of images; retry")
        return [looked_up(result, key) for result, key in zip(response.results, keys, strict=True)]

    async def touch(self, keys: Sequence[ContentKey], options: ProcessorOptions) -> None:
        """Extends the lifetime of at most MAX_LOOKUP_KEYS shared cache entries."""
        request = encoder_service_pb2.LookupEmbeddingsRequest(
            keys=[wire_key(key) for key in keys], **wire_options(options), touch=True
        )
        await self._answer(self._stub.LookupEmbeddings, request, _LOOKUP_TIMEOUT_S, self._metadata())

    async def read_rows(
        self, key: ContentKey, start: int, stop: int, out: memoryview, timeout_s: float, *, options: ProcessorOptions
    ) -> None:
        """Reads rows [start, stop) from the encoder into `out`, which has exactly their size.

        Used if the shared cache does not have them. Raises EmbeddingNotCachedError if the encoder does not have them
        either, UnavailableError if it cannot be reached.
        """
        reader = RowStreamReader(key, start, stop, out)
        request = encoder_service_pb2.ReadEmbeddingRequest(
            key=wire_key(key), row_offset=start, row_count=stop - start, **wire_options(options)
        )
        call = self._stub.ReadEmbedding(request, timeout=timeout_s, metadata=self._metadata(key))
        try:
            async for chunk in call:
                reader.take(parsed(chunk, SENDER))
        except grpc.aio.AioRpcError as error:
            raise self._noted(self._reach.error_of(error, timeout_s)) from None
        finally:
            call.cancel()
        reader.finish()

    async def _encode(
        self, key: ContentKey, request: encoder_service_pb2.EncodeRequest, timeout_s: float
    ) -> encoder_service_pb2.EncodeResult:
        try:
            response = await self._answer(self._stub.Encode, request, timeout_s, self._metadata(key))
        except LookonceError as error:
            raise without_position(error) from None
        if len(response.results) != 1:
            raise UnavailableError("the encoder service returned no result for an image; retry")
        check_key(response.results[0].embedding, key)
        return response.results[0]

    async def _answer(
        self, method: Callable[..., Awaitable[ReplyT]], request: Message, timeout_s: float, metadata: tracing.Metadata
    ) -> ReplyT:
        """Calls a method and returns its reply. Raises LookonceError, and notes it.

        No variable holds the call: its error's traceback holds the frame, and so the image in the request.
        """
        try:
            reply = parsed(await method(request, timeout=timeout_s, metadata=metadata), SENDER)
            self._reach.note_answer()
            return reply
        except grpc.aio.AioRpcError as error:
            raise self._noted(self._reach.error_of(error, timeout_s)) from None
        except UnavailableError as error:
            raise self._noted(error) from None

    def _metadata(self, key: ContentKey | None = None) -> tracing.Metadata:
        """Returns the call's metadata: credentials, tenant, request id and trace context.

        `key`: the image that the call is about; a proxy may route by its digest.
        """
        pairs = list(tracing.metadata())
        if key is not None:
            pairs.append((_DIGEST_KEY, key.digest.hex()))
        request_id, tenant = current_request_id(), current_identity().tenant
        if request_id is not None:
            pairs.append((REQUEST_ID_KEY, request_id))
        if tenant:
            pairs.append((TENANT_KEY, tenant))
        if self._settings.token is not None:
            pairs.append(("authorization", f"Bearer {self._settings.token.value}"))
        return tuple(pairs)

    def _noted(self, error: LookonceError) -> LookonceError:
        if isinstance(error, FingerprintMismatchError):
            self._info = None
        self._is_in_doubt |= isinstance(error, UnavailableError)
        return error
