"""Encodes one image that no cache has: admission → header → turn → preprocessing → forward pass → rows.

Knows neither caches nor other replicas; pipeline.py asks it once per image, however many requests wait for the rows.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from contextlib import AsyncExitStack

from encoder_svc.cache.encode_job import EncodeJob
from encoder_svc.cache.local_cache import LocalEmbedding
from encoder_svc.cache.queue_places import QueuePlaces
from encoder_svc.cache.single_flight import Flight
from encoder_svc.images.decode_turns import decode_request
from encoder_svc.images.file_readers import FileReaders
from encoder_svc.images.pixel_budget import PixelBudget
from encoder_svc.images.preprocess import Preprocessor
from encoder_svc.images.quarantine import Quarantine
from encoder_svc.metrics import EncoderMetrics
from encoder_svc.vision.batcher import ForwardBatcher
from encoder_svc.vision.forward_queue import EncodedRows
from encoder_svc.vision.vision_model import VisionModel, row_bytes
from lookonce import tracing
from lookonce.embedding_meta import EmbeddingMeta
from lookonce.errors import ImagePoisonousError
from lookonce.image_file import files_of
from lookonce.media.image_header import ImageHeader
from lookonce.turns.cost_turns import TurnRequest


class ImageEncoder:
    """Takes images through preprocessor and model. Called on the event loop; the work happens in threads."""

    def __init__(
        self,
        model: VisionModel,
        preprocessor: Preprocessor,
        batcher: ForwardBatcher,
        metrics: EncoderMetrics,
        *,
        places: QueuePlaces,
        budget: PixelBudget,
        quarantine: Quarantine,
    ) -> None:
        """Owns `preprocessor` and `batcher`.

        `places` bounds the images between admission and the end of their forward pass. `budget` bounds the memory of
        their pixels and lets tenants take turns. `quarantine` holds the cache keys of images on which the model fails;
        a key stands for the options and the tenant as well.
        """
        self._model = model
        self._preprocessor = preprocessor
        # Threads in which files are read before they are decoded. The pipeline hashes them there.
        self.readers = FileReaders()
        self._batcher = batcher
        self._metrics = metrics
        self._places = places
        metrics.queued_images.set_function(lambda: len(places))
        self._budget = budget
        self._quarantine = quarantine

    @property
    def is_healthy(self) -> bool:
        """Whether forward passes end, and do not all fail."""
        return self._batcher.is_healthy

    @property
    def has_died(self) -> bool:
        """Whether the forward thread has ended, so that only a new process helps."""
        return self._batcher.has_died

    async def encode(self, job: EncodeJob, flight: Flight) -> LocalEmbedding:
        """Returns the rows of an image.

        `flight` may be dropped while the image waits for a turn, but neither when it is decoded nor during its forward
        pass.

        Raises OverloadedError, UnavailableError, MemoryError, the image errors of `image_header` and `preprocess`, and
        ImagePoisonousError for an image on which the model fails.
        """
        self._quarantine.check(job.key.value)
        async with AsyncExitStack() as held:
            held.enter_context(self._places.taken(job.key.tenant_tag, flight))
            admitted_s = time.monotonic()
            self._batcher.check_answering()
            with flight.waiting():
                header = await self.readers.run(job.turn, self._preprocessor.read_header, job.data, job.options)
                reservation = await held.enter_async_context(self._budget.reserved(_decode_request(job, header)))
            inputs = await self._preprocessor.prepare(job.data, header, job.key.digest, job.options)
            reservation.charge(inputs.size_bytes)
            with flight.waiting():
                await job.turn.wait()
            submitted = self._batcher.submit(inputs, job.turn.caller, job.turn.number)
            job.turn.pass_on()
            # The queue owns the pixels now and frees them at the end of their pass.
            del inputs
            try:
                with flight.waiting(submitted.cancel):
                    encoded = await self._judged(job, submitted)
            finally:
                # The future keeps its exception, whose traceback refers to this frame, and so to the image.
                del submitted
            self._metrics.queue_seconds.observe(max(0.0, time.monotonic() - admitted_s - encoded.compute_s))
        return LocalEmbedding(self._meta_of(job, encoded, header), row_bytes(encoded.rows), encoded.compute_s)

    def close(self) -> None:
        """Stops preprocessing and forward passes. Blocks until the work in progress has ended."""
        self.readers.close()
        self._preprocessor.close()
        self._batcher.close()

    async def _judged(self, job: EncodeJob, submitted: Future[EncodedRows]) -> EncodedRows:
        """Waits for the forward pass, and keeps the quarantine's record of the image."""
        try:
            encoded = await asyncio.wrap_future(submitted)
        except ImagePoisonousError:
            self._quarantine.strike(job.key.value)
            raise
        finally:
            del submitted
        self._quarantine.absolve(job.key.value)
        # Each image of a pass gets its own span, in the trace of the call that brought it.
        tracing.record(
            "encode.forward",
            encoded.began_s,
            encoded.began_s + encoded.compute_s,
            num_rows=encoded.rows.shape[0],
            num_images=encoded.num_together,
        )
        return encoded

    def _meta_of(self, job: EncodeJob, encoded: EncodedRows, header: ImageHeader) -> EmbeddingMeta:
        return EmbeddingMeta(
            num_rows=encoded.rows.shape[0],
            hidden_size=self._model.hidden_size,
            num_levels=self._model.num_levels,
            dtype=self._model.row_dtype,
            image_width=header.width,
            image_height=header.height,
            file_tags=job.file_tags,
        )


def _decode_request(job: EncodeJob, header: ImageHeader) -> TurnRequest:
    return decode_request(job.turn.caller, job.turn.number, header.num_pixels * len(files_of(job.data)))
