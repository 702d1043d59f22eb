"""EncoderService: protobuf in, pipeline, protobuf out. Errors are raised; the server shell turns them into statuses."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager
from dataclasses import replace

import grpc.aio

import lookonce
from encoder_svc import wire
from encoder_svc.cache.encode_job import CachePolicy, EncodeOutcome, ImageInput
from encoder_svc.cache.pipeline import EncodePipeline
from encoder_svc.concurrent_map import map_concurrently
from encoder_svc.held_rows import HeldRows, RowCopies
from encoder_svc.settings import EncoderSettings
from lookonce.common.v1 import common_pb2
from lookonce.content_key import ContentKey, ImageDigest, ProcessorOptions, Tenant
from lookonce.encoder.v1 import encoder_service_pb2 as pb
from lookonce.encoder.v1 import encoder_service_pb2_grpc as pb_grpc
from lookonce.errors import (
    EmbeddingNotCachedError,
    InternalError,
    InvalidInputError,
    InvalidParameterError,
    LookonceError,
    OverloadedError,
)
from lookonce.identity import current_identity
from lookonce.image_file import num_file_bytes
from lookonce.logs import get_logger
from lookonce.server.admission.image_shares import ImageShares
from lookonce.server.admission.quotas import Quotas, Resource
from lookonce.server.telemetry import current_request_id
from lookonce.status_codes import from_reason, status_row
from lookonce.tenants import Tenants
from lookonce.turns.fair_queue import CallerId
from lookonce.turns.item_turns import Place

SERVICE_NAME = "lookonce.encoder.v1.EncoderService"
MAX_LOOKUP_KEYS = 256
# Keys of a call that are looked up in one turn: they take about as long as an image.
_KEYS_PER_TURN = 16
# Maximum size of a ReadEmbedding message; it holds whole rows.
CHUNK_BYTES = 1 << 20
# Items of one EncodeStream in progress at a time, in full forward passes.
_STREAM_BATCHES = 2

_log = get_logger(__name__)


class EncoderServicer(pb_grpc.EncoderServiceServicer):
    """Handlers of the five RPCs."""

    def __init__(self, pipeline: EncodePipeline, tenants: Tenants, quotas: Quotas, settings: EncoderSettings) -> None:
        self._pipeline = pipeline
        self._tenants = tenants
        self._quotas = quotas
        self._settings = settings
        self._shares = ImageShares(settings.max_queued_bytes)
        self._reads = HeldRows(settings.max_queued_bytes)
        pipeline.metrics.queued_bytes.set_function(lambda: self._shares.num_bytes)

    async def Encode(
        self, request: pb.EncodeRequest, context: grpc.aio.ServicerContext[pb.EncodeRequest, pb.EncodeResponse]
    ) -> pb.EncodeResponse:
        """Answers with all items or one error.

        The error is that of the first invalid item, else NOT_FOUND with the indexes of all items that are not cached.
        """
        self._pipeline.check_fingerprint(request.expected_encoder_fingerprint)
        cache_policy = wire.parse_cache_policy(request.cache_policy)
        if not 1 <= len(request.items) <= self._settings.max_batch_items:
            raise InvalidParameterError(
                "items", f"must hold 1 … {self._settings.max_batch_items} images, not {len(request.items)}"
            )
        token = (
            request.removal_token if request.HasField("removal_token") else self._pipeline.tiers.removals.heard_token
        )
        images = [self._image(item.image, f"items[{index}].image", token) for index, item in enumerate(request.items)]
        wants_rows = [item.rows_if_not_stored for item in request.items]
        # The files are copied from it, and calls may wait for long.
        del request
        with self._in_progress(images):
            outcomes = await self._encode_all(images, cache_policy)
        results = [wire.encode_result(outcome) for outcome in outcomes]
        left_bytes = self._settings.max_message_bytes // 2
        copies = self._copies_until_answered()
        for is_wanted, outcome, result in zip(wants_rows, outcomes, results, strict=True):
            if is_wanted:
                left_bytes -= await self._add_rows(result, outcome, left_bytes, copies)
        return pb.EncodeResponse(results=results)

    async def EncodeStream(
        self,
        requests: AsyncIterator[pb.EncodeStreamRequest],
        context: grpc.aio.ServicerContext[pb.EncodeStreamRequest, pb.EncodeStreamResponse],
    ) -> AsyncIterator[pb.EncodeStreamResponse]:
        """Answers items in order of completion. Reads the next one only while few enough are in progress."""
        max_running = _STREAM_BATCHES * self._settings.max_forward_images
        with self._reads.copies(self._tenant().tag) as copies:
            work = functools.partial(self._answer_item, copies)
            async with aclosing(map_concurrently(aiter(requests), work, max_running)) as answers:
                async for answer, num_row_bytes in answers:
                    yield answer
                    if num_row_bytes:
                        copies.give_back(num_row_bytes)

    async def LookupEmbeddings(
        self,
        request: pb.LookupEmbeddingsRequest,
        context: grpc.aio.ServicerContext[pb.LookupEmbeddingsRequest, pb.LookupEmbeddingsResponse],
    ) -> pb.LookupEmbeddingsResponse:
        """Answers with one result per key, in the order of the keys."""
        if len(request.keys) > MAX_LOOKUP_KEYS:
            raise InvalidParameterError("keys", f"at most {MAX_LOOKUP_KEYS} keys in a call, not {len(request.keys)}")
        options = wire.parse_options(request)
        digests = [self._digest(key, f"keys[{index}]") for index, key in enumerate(request.keys)]
        tenant = self._tenant()
        response = pb.LookupEmbeddingsResponse()
        for start in range(0, len(digests), _KEYS_PER_TURN):
            group = digests[start : start + _KEYS_PER_TURN]
            async with self._pipeline.item_turns.place(CallerId(tenant.tag, _request_id()), len(group)):
                keys = [self._pipeline.key_of(digest, options, tenant) for digest in group]
                found = await self._pipeline.lookup(keys, touch=request.touch)
                response.results.extend(map(wire.lookup_result, keys, found))
        return response

    async def ReadEmbedding(
        self,
        request: pb.ReadEmbeddingRequest,
        context: grpc.aio.ServicerContext[pb.ReadEmbeddingRequest, pb.ReadEmbeddingResponse],
    ) -> AsyncIterator[pb.ReadEmbeddingResponse]:
        """Sends chunks of whole rows; the first chunk describes the embedding."""
        key = self._key(request.key, "key", wire.parse_options(request))
        found = await self._pipeline.read(key, request.row_offset, request.row_count)
        width = found.meta.row_bytes
        chunk_bytes = max(CHUNK_BYTES // width, 1) * width
        with self._held(self._reads.held(self._tenant().tag, found.rows)):
            for offset in range(0, found.rows.nbytes, chunk_bytes):
                yield pb.ReadEmbeddingResponse(
                    embedding=wire.embedding_info(key, found.meta) if offset == 0 else None,
                    row_offset=found.start + offset // width,
                    data=bytes(found.rows[offset : offset + chunk_bytes]),
                )

    async def GetEncoderInfo(
        self,
        request: pb.GetEncoderInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetEncoderInfoRequest, pb.GetEncoderInfoResponse],
    ) -> pb.GetEncoderInfoResponse:
        """Answers with the model's identity and the service's limits."""
        model = self._pipeline.model
        return pb.GetEncoderInfoResponse(
            model=self._settings.model_name,
            encoder_fingerprint=model.fingerprint,
            max_batch_items=self._settings.max_batch_items,
            max_image_bytes=self._settings.max_image_bytes,
            hidden_size=model.hidden_size,
            version=lookonce.__version__,
            max_message_bytes=self._settings.max_message_bytes,
            max_image_pixels=self._settings.max_image_pixels,
            dtype=wire.DATA_TYPES[model.row_dtype],
            model_type=model.model_type,
            num_levels=model.num_levels,
            tenant_tag=self._tenants.default.tag,
        )

    def _tenant(self) -> Tenant:
        return self._tenants.named(current_identity().tenant)

    def _image(self, image: common_pb2.ImageSource, field: str, removal_token: bytes | None) -> ImageInput:
        parsed = replace(wire.parse_image(image, field), removal_token=removal_token)
        if parsed.data is not None:
            self._quotas.charge(current_identity(), Resource.IMAGE_BYTES, num_file_bytes(parsed.data))
        self._pipeline.check_fingerprint(image.key.encoder_fingerprint)
        return parsed

    def _in_progress(self, images: Sequence[ImageInput]) -> AbstractContextManager[None]:
        """Counts the images of a call as its tenant's. Raises OverloadedError if the tenant has too many."""
        num_bytes = sum(num_file_bytes(image.data) for image in images if image.data is not None)
        return self._held(self._shares.taken(self._tenant().tag, len(images), num_bytes))

    @contextmanager
    def _held(self, share: AbstractContextManager[None]) -> Iterator[None]:
        """Holds a tenant's share during the block, and counts a refusal."""
        with ExitStack() as held:
            try:
                held.enter_context(share)
            except OverloadedError as error:
                self._pipeline.metrics.rejected.labels(status_row(error).reason).inc()
                raise
            yield

    def _key(self, key: common_pb2.ContentKey, field: str, options: ProcessorOptions) -> ContentKey:
        return self._pipeline.key_of(self._digest(key, field), options, self._tenant())

    def _digest(self, key: common_pb2.ContentKey, field: str) -> ImageDigest:
        digest = wire.parse_key(key, field)
        self._pipeline.check_fingerprint(key.encoder_fingerprint)
        return digest

    def _pixel_charge(self, *, in_stream: bool) -> Callable[[int], None] | None:
        """Returns the charge for the pixels of an image; None for a caller without a limit on pixels.

        A call that was admitted is served whole. In a stream, the charge refuses an image that comes during a debt.
        """
        identity = current_identity()
        if not self._quotas.has_limit(identity, Resource.IMAGE_PIXELS):
            return None

        def charge(num_pixels: int) -> None:
            if in_stream:
                self._quotas.check(identity, Resource.IMAGE_PIXELS)
            self._quotas.charge(identity, Resource.IMAGE_PIXELS, num_pixels)

        return charge

    async def _encode_all(self, images: Sequence[ImageInput], cache_policy: CachePolicy) -> list[EncodeOutcome]:
        charge_pixels = self._pixel_charge(in_stream=False)
        results = await self._pipeline.item_turns.run_all(
            CallerId(self._tenant().tag, _request_id()),
            [functools.partial(self._encode_one, image, cache_policy, charge_pixels) for image in images],
            # One answer for all: the images of a call that is refused take no places from calls that can be served.
            ends_all=(OverloadedError,),
        )
        outcomes = [result for result in results if isinstance(result, EncodeOutcome)]
        missing = [index for index, result in enumerate(results) if isinstance(result, EmbeddingNotCachedError)]
        failures = [
            _located(result, index)
            for index, result in enumerate(results)
            if isinstance(result, Exception) and not isinstance(result, EmbeddingNotCachedError)
        ]
        # The traceback of an exception refers to the frame that raises it. A reference back would be a cycle, which
        # keeps the images in memory until the next garbage collection.
        results.clear()
        if failures:
            raise failures.pop(0)
        if missing:
            raise EmbeddingNotCachedError(
                f"no rows are cached for {len(missing)} of {len(images)} images; send their bytes", indexes=missing
            )
        return outcomes

    async def _encode_one(
        self,
        image: ImageInput,
        cache_policy: CachePolicy,
        charge_pixels: Callable[[int], None] | None,
        place: Place | None = None,
    ) -> EncodeOutcome:
        try:
            return await self._pipeline.encode(image, cache_policy, self._tenant(), _request_id(), charge_pixels, place)
        except LookonceError as error:
            self._pipeline.metrics.rejected.labels(status_row(error).reason).inc()
            raise
        except MemoryError:
            # The border answers the call with the same status, an item of a stream gets it in `_answer_item`.
            self._pipeline.metrics.rejected.labels(status_row(_no_memory()).reason).inc()
            raise

    async def _answer_item(
        self, copies: RowCopies, request: pb.EncodeStreamRequest
    ) -> tuple[pb.EncodeStreamResponse, int]:
        """Answers one item of a stream: returns the answer and the size of its rows, which `copies` counts, in bytes.

        Never raises: a failure is the item's answer.
        """
        item_id, wants_rows = request.item_id, request.item.rows_if_not_stored
        try:
            for resource in (Resource.IMAGE_BYTES, Resource.IMAGE_PIXELS):
                self._quotas.check(current_identity(), resource)
            image = self._image(request.item.image, "item.image", self._pipeline.tiers.removals.heard_token)
            del request
            charge_pixels = self._pixel_charge(in_stream=True)
            with self._in_progress([image]):
                outcome = await self._encode_one(image, CachePolicy.READ_AND_WRITE, charge_pixels)
        except LookonceError as error:
            return pb.EncodeStreamResponse(item_id=item_id, error=wire.item_error(error)), 0
        except MemoryError as error:
            _log.error("no memory for an item", exc_info=error)
            return pb.EncodeStreamResponse(item_id=item_id, error=wire.item_error(_no_memory())), 0
        except Exception as fault:
            fault_id = uuid.uuid4().hex
            _log.error("unexpected error in an item", fault_id=fault_id, exc_info=fault)
            opaque = InternalError(f"internal error {fault_id}")
            return pb.EncodeStreamResponse(item_id=item_id, error=wire.item_error(opaque)), 0
        result = wire.encode_result(outcome)
        num_row_bytes = 0
        if wants_rows:
            num_row_bytes = await self._add_rows(result, outcome, self._settings.max_message_bytes // 2, copies)
        return pb.EncodeStreamResponse(item_id=item_id, result=result), num_row_bytes

    def _copies_until_answered(self) -> RowCopies:
        """Returns a counter for the copies of rows in this call's answer. They count until the call's task ends.

        The task ends when gRPC has written the answer, or when the call was cancelled.
        """
        task = asyncio.current_task()
        assert task is not None, "calls run in tasks"
        held = ExitStack()
        copies = held.enter_context(self._reads.copies(self._tenant().tag))
        task.add_done_callback(lambda _: held.close())
        return copies

    async def _add_rows(
        self, result: pb.EncodeResult, outcome: EncodeOutcome, left_bytes: int, copies: RowCopies
    ) -> int:
        """Puts the rows into the result if the shared cache lacks them and they fit. Returns their size in bytes.

        `copies` counts the rows. Without room for them, the result goes without rows, since all else is done: the
        client can read them with ReadEmbedding later.
        """
        num_bytes = outcome.meta.size_bytes
        if outcome.stored or num_bytes > left_bytes:
            return 0
        try:
            copies.take(num_bytes)
        except OverloadedError as error:
            self._pipeline.metrics.rejected.labels(status_row(error).reason).inc()
            return 0
        rows = outcome.rows
        if rows is None:
            try:
                rows = (await self._pipeline.read(outcome.key, 0, 0)).rows
            except EmbeddingNotCachedError:
                # The local cache has evicted them already. The client will get the same answer from ReadEmbedding.
                copies.give_back(num_bytes)
                return 0
        result.rows = bytes(rows)
        return num_bytes


def _request_id() -> str:
    """The call's request id. A decoder passes its own id on, so all images of one prompt have the same one."""
    request_id = current_request_id()
    assert request_id is not None, "an interceptor gives every call an id"
    return request_id


def _located(error: BaseException, index: int) -> BaseException:
    """The same error with the item's index. A new object, because calls that share a flight share its error."""
    if isinstance(error, InvalidParameterError):
        return InvalidParameterError(f"items[{index}].image.{error.field}", error.description)
    if isinstance(error, InvalidInputError):
        return from_reason(status_row(error).reason, error.message, {**error.metadata, "index": str(index)})
    return error


def _no_memory() -> OverloadedError:
    return OverloadedError("the server has no memory left for this image; retry later, or send less at once")
