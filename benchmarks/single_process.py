"""`python -m benchmarks.single_process`: decoder and encoder in one process, served as a decoder; for comparisons.

The parts are the services' own: the encoder's pipeline and the decoder's engine on one event loop. Between them there
is neither gRPC nor Redis: rows are handed over in memory. The flags are the decoder's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from decoder_svc.rows.encoder_client import EncodedImage, EncoderClient
from decoder_svc.rows.encoder_info import EncoderInfo
from decoder_svc.settings import DecoderSettings
from encoder_svc.cache.encode_job import CachePolicy, ImageInput, Origin
from encoder_svc.settings import EncoderSettings
from lookonce.content_key import ContentKey, ProcessorOptions
from lookonce.embedding_meta import EmbeddingMeta
from lookonce.image_file import ImageFile
from lookonce.model.libraries.lean_transformers import import_lean_transformers
from lookonce.server import serving
from lookonce.server.admission.quotas import load_quotas
from lookonce.server.settings_parser import parse_settings
from lookonce.server.telemetry import Telemetry
from lookonce.tenants import load_tenants

if TYPE_CHECKING:
    from encoder_svc.cache.pipeline import EncodePipeline

_REQUEST_ID = "this process"


class InProcessEncoder(EncoderClient):
    """An encoder client that calls a pipeline on the same event loop instead of a service."""

    def __init__(self, pipeline: EncodePipeline, settings: EncoderSettings) -> None:
        """The pipeline's owner closes it."""
        self._pipeline = pipeline
        self._encoder_settings = settings
        self._tenant = load_tenants(settings.tenant_secret_file).default

    async def close(self) -> None:
        """There is no channel to close."""

    @property
    def has_only_strangers(self) -> bool:
        """The pipeline is from the same folder."""
        return False

    async def info(self) -> EncoderInfo:
        """Returns the description of the pipeline's model."""
        model = self._pipeline.model
        return EncoderInfo(
            fingerprint=model.fingerprint,
            model_type=model.model_type,
            hidden_size=model.hidden_size,
            num_levels=model.num_levels,
            dtype=model.row_dtype,
            max_image_bytes=self._encoder_settings.max_image_bytes,
            max_image_pixels=self._encoder_settings.max_image_pixels,
        )

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
        """All rows come with the answer. Nobody removes images here."""
        use = CachePolicy.REFRESH if refresh else CachePolicy.READ_AND_WRITE
        outcome = await self._pipeline.encode(ImageInput(data, key.digest, options), use, self._tenant, _REQUEST_ID)
        found = await self._pipeline.read(outcome.key, 0, 0)
        was_computed = outcome.origin is Origin.COMPUTED
        return EncodedImage(outcome.meta, outcome.stored, was_computed, bytes(found.rows))

    async def lookup(self, keys: Sequence[ContentKey], options: ProcessorOptions) -> list[EmbeddingMeta | None]:
        """Shapes of the rows that the pipeline still has."""
        return await self._pipeline.lookup(keys, touch=False)

    async def touch(self, keys: Sequence[ContentKey], options: ProcessorOptions) -> None:
        """Nothing here has a life to prolong."""

    async def read_rows(
        self, key: ContentKey, start: int, stop: int, out: memoryview, timeout_s: float, *, options: ProcessorOptions
    ) -> None:
        """Rows [start, stop) of what the pipeline still has."""
        out[:] = (await self._pipeline.read(key, start, stop - start)).rows


async def serve(arguments: Sequence[str]) -> None:
    """Runs decoder and encoder until SIGTERM."""
    # The services import it this way, too.
    import_lean_transformers()
    from decoder_svc.service import open_service
    from encoder_svc.service import open_pipeline
    from encoder_svc.vision.vision_model import VisionModel

    settings = parse_settings(DecoderSettings, arguments, "single_process")
    telemetry = Telemetry.from_settings(settings)
    quotas = load_quotas(settings, telemetry.registry)
    shared = ["--model", str(settings.model), "--dtype", settings.dtype]
    if settings.num_threads is not None:
        shared += ["--num-threads", str(settings.num_threads)]
    encoder_settings = parse_settings(EncoderSettings, shared, "single_process")
    model = VisionModel.load_warm(encoder_settings.vision)
    # A registry of its own: both halves have metrics of the cache, which would be named twice.
    async with (
        open_pipeline(encoder_settings, model, CollectorRegistry()) as pipeline,
        open_service(settings, telemetry.registry, quotas, InProcessEncoder(pipeline, encoder_settings)) as service,
    ):
        server = serving.GrpcService(
            settings, telemetry, [service.entry()], is_ready=lambda: service.is_ready() and pipeline.is_healthy
        )
        await server.serve_until_stopped()


if __name__ == "__main__":
    serving.run(serve(sys.argv[1:]))
