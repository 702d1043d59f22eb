"""Image files → pixel tensors: decoding in processes of their own, then the model's image processor in threads."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from encoder_svc.decode_worker import DecodeWorker
from encoder_svc.families import PixelInputs, VisionFamily
from lookonce.content_key import ImageDigest, ProcessorOptions, image_digest
from lookonce.errors import ImagePoisonousError
from lookonce.image_header import ImageHeader, ImageLimits, probe_image

# An image that killed a worker so often is not decoded again; the last so many are remembered.
_MAX_KILLS = 2
_MAX_REMEMBERED = 1024


class Preprocessor:
    """A pool of threads, each with a decoding process; image processors run in the threads and release the GIL."""

    def __init__(self, family: VisionFamily, limits: ImageLimits, num_workers: int, decode_timeout_s: float) -> None:
        """`decode_timeout_s`: longest time one image may take to decode, seconds."""
        self._family = family
        self._limits = limits
        self._decode_timeout_s = decode_timeout_s
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="preprocess")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._decoders: list[DecodeWorker] = []
        self._kills: OrderedDict[ImageDigest, int] = OrderedDict()

    async def prepare(self, data: bytes, options: ProcessorOptions) -> tuple[PixelInputs, ImageHeader]:
        """Pixels of one image file; `options` have been checked.

        Raises ImageUndecodableError, ImageTooLargeError, ImageDecodeLimitError or ImagePoisonousError.
        """
        return await asyncio.get_running_loop().run_in_executor(self._workers, self._prepare, data, options)

    def close(self) -> None:
        """Waits for the images in work, drops the others and ends the decoding processes."""
        self._workers.shutdown(cancel_futures=True)
        for decoder in self._decoders:
            decoder.close()

    def _prepare(self, data: bytes, options: ProcessorOptions) -> tuple[PixelInputs, ImageHeader]:
        # What the header tells costs nothing here, and no process there.
        probe_image(data, self._limits)
        self._check_quarantine(data)
        try:
            image, header = self._decoder().decode(data)
        except ImagePoisonousError:
            self._note_kill(image_digest(data))
            raise
        return self._family.pixel_inputs(image, options), header

    def _decoder(self) -> DecodeWorker:
        """This thread's."""
        decoder: DecodeWorker | None = getattr(self._own, "decoder", None)
        if decoder is None:
            decoder = self._own.decoder = DecodeWorker(self._limits, self._decode_timeout_s)
            with self._lock:
                self._decoders.append(decoder)
        return decoder

    def _check_quarantine(self, data: bytes) -> None:
        with self._lock:
            is_known = self._kills and self._kills.get(image_digest(data), 0) >= _MAX_KILLS
        if is_known:
            raise ImagePoisonousError("the image has killed decoding processes before; it is not tried again")

    def _note_kill(self, digest: ImageDigest) -> None:
        with self._lock:
            self._kills[digest] = self._kills.pop(digest, 0) + 1
            while len(self._kills) > _MAX_REMEMBERED:
                self._kills.popitem(last=False)
