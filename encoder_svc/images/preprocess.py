"""Turns image files into pixel tensors: decodes in separate processes, then runs the image processor in threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import PIL.Image

from encoder_svc.images.decode_worker import DecodeWorker
from encoder_svc.images.image_inputs import PixelInputs, VisionAdapter
from encoder_svc.images.quarantine import Quarantine
from lookonce import tracing
from lookonce.content_key import ImageDigest, ProcessorOptions, image_digest
from lookonce.errors import ImagePoisonousError
from lookonce.image_file import FramePair, ImageFile, files_of
from lookonce.media.image_header import ImageHeader, ImageLimits, probe_file
from lookonce.model.lack_of_memory import memory_errors
from lookonce.process.process_clock import TimeLimits
from lookonce.threads import run_in_thread


class Preprocessor:
    """A pool of threads, each with a decoding process. Image processors run in the threads and release the GIL."""

    def __init__(
        self,
        adapter: VisionAdapter,
        limits: ImageLimits,
        num_workers: int,
        time_limits: TimeLimits,
        quarantine: Quarantine,
    ) -> None:
        """`time_limits` bound the decoding of one image.

        `quarantine` holds the digests of files that kill decoding processes; options make no difference to decoding.
        """
        self._adapter = adapter
        self._limits = limits
        self._time_limits = time_limits
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="preprocess")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._decoders: list[DecodeWorker] = []
        self._quarantine = quarantine

    def read_header(self, data: ImageFile, options: ProcessorOptions) -> ImageHeader:
        """Returns the header of an image file, or of video frames, after checking it; `options` have been checked.

        Takes up to some 30 ms for a file with much metadata: call it in a thread. Raises ImageUndecodableError,
        ImageTooLargeError or ImageDecodeLimitError, and InvalidParameterError for frames of different sizes, and for a
        size that the model's frames do not have.
        """
        header = probe_file(data, self._limits)
        self._adapter.check_size(header.width, header.height, options)
        return header

    async def prepare(
        self, data: ImageFile, header: ImageHeader, digest: ImageDigest, options: ProcessorOptions
    ) -> PixelInputs:
        """Returns the pixels of an image file, or pair of frames, with this checked header and this digest.

        Raises ImageUndecodableError, ImageTooLargeError, ImageDecodeLimitError, ImagePoisonousError, UnavailableError,
        or MemoryError.
        """
        return await run_in_thread(self._workers, self._prepare, data, header, digest, options)

    def close(self) -> None:
        """Waits for the images in progress, drops the others and ends the decoding processes."""
        self._workers.shutdown(cancel_futures=True)
        for decoder in self._decoders:
            decoder.close()

    def _prepare(
        self, data: ImageFile, header: ImageHeader, digest: ImageDigest, options: ProcessorOptions
    ) -> PixelInputs:
        if not isinstance(data, FramePair):
            image = self._decoded(data, digest)
            with _span(header), memory_errors():
                return self._adapter.pixel_inputs(image, options)
        # A generator, so that each frame is scaled down before the next one is decoded.
        frames = (self._decoded(file, image_digest(file)) for file in files_of(data))
        with _span(header), memory_errors():
            return self._adapter.frame_inputs(frames, options)

    def _decoded(self, data: bytes, digest: ImageDigest) -> PIL.Image.Image:
        """Upright RGB pixels of a file. Raises ImagePoisonousError for a file in quarantine."""
        self._quarantine.check(digest)
        try:
            with tracing.span("encode.decode_image", num_bytes=len(data)):
                image, _ = self._decoder().decode(data)
        except ImagePoisonousError:
            self._quarantine.strike(digest)
            raise
        self._quarantine.absolve(digest)
        return image

    def _decoder(self) -> DecodeWorker:
        """The decoding process of the current thread, started on first use."""
        decoder: DecodeWorker | None = getattr(self._own, "decoder", None)
        if decoder is None:
            decoder = self._own.decoder = DecodeWorker(self._limits, self._time_limits)
            with self._lock:
                self._decoders.append(decoder)
        return decoder


def _span(header: ImageHeader) -> tracing.SpanBlock:
    return tracing.span("encode.preprocess", width=header.width, height=header.height)
