"""The encoder of a FakeServer: it knows digests and has no rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lookonce.common.v1 import common_pb2
from lookonce.content_key import ImageDigest
from lookonce.encoder.v1 import encoder_service_pb2 as encoder_pb2
from lookonce.encoder.v1 import encoder_service_pb2_grpc as encoder_grpc
from lookonce.errors import LookonceError
from lookonce.testing.endings import abort, not_offered
from lookonce.testing.fake_request import images_of
from lookonce.testing.known_images import KnownImages

_MAX_BATCH_ITEMS = 64
_ROW_BYTES = 4


class FakeEncoder(encoder_grpc.EncoderServiceServicer):
    """Answers the calls that the SDK makes: Encode, LookupEmbeddings and GetEncoderInfo."""

    def __init__(self, images: KnownImages, max_message_bytes: int) -> None:
        self._images = images
        self._max_message_bytes = max_message_bytes

    def Encode(self, request: encoder_pb2.EncodeRequest, context: Any) -> encoder_pb2.EncodeResponse:
        response = encoder_pb2.EncodeResponse()
        images = list(images_of(item.image for item in request.items))
        known = [image.digest in self._images for image in images]
        try:
            self._images.shown(images)
        except LookonceError as error:
            abort(context, error)
        for image, was_known in zip(images, known, strict=True):
            source = encoder_pb2.RESULT_SOURCE_LOCAL_CACHE if was_known else encoder_pb2.RESULT_SOURCE_COMPUTED
            response.results.add(source=source, stored=True, embedding=self._embedding(image.digest))
        return response

    def LookupEmbeddings(
        self, request: encoder_pb2.LookupEmbeddingsRequest, context: Any
    ) -> encoder_pb2.LookupEmbeddingsResponse:
        response = encoder_pb2.LookupEmbeddingsResponse()
        for key in request.keys:
            result = response.results.add(cached=key.digest in self._images)
            if result.cached:
                result.embedding.CopyFrom(self._embedding(ImageDigest(key.digest)))
        return response

    def GetEncoderInfo(
        self, request: encoder_pb2.GetEncoderInfoRequest, context: Any
    ) -> encoder_pb2.GetEncoderInfoResponse:
        return encoder_pb2.GetEncoderInfoResponse(
            max_batch_items=_MAX_BATCH_ITEMS, max_message_bytes=self._max_message_bytes
        )

    def EncodeStream(
        self, request_iterator: Iterator[encoder_pb2.EncodeStreamRequest], context: Any
    ) -> Iterator[encoder_pb2.EncodeStreamResponse]:
        abort(context, not_offered())

    def ReadEmbedding(
        self, request: encoder_pb2.ReadEmbeddingRequest, context: Any
    ) -> Iterator[encoder_pb2.ReadEmbeddingResponse]:
        abort(context, not_offered())

    def _embedding(self, digest: ImageDigest) -> common_pb2.EmbeddingInfo:
        num_rows = self._images.rows_per_image
        return common_pb2.EmbeddingInfo(
            key=common_pb2.ContentKey(digest=digest), num_rows=num_rows, size_bytes=num_rows * _ROW_BYTES
        )
