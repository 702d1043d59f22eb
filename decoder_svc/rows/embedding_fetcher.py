"""Fetches ranges of embedding rows in the background: from the shared cache, else from the encoder service.

One fetch of a range serves every request that needs it. If no cache has the rows and the request brought no image
bytes, the fetch fails with EmbeddingNotCachedError. An error of the shared cache counts as a miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from decoder_svc.rows.encoder_client import EncoderClient
from decoder_svc.rows.encoder_info import EncoderInfo
from decoder_svc.rows.fetch_metrics import FetchMetrics, FetchTier
from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.rows.ttl_refresher import TtlRefresher
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.scheduler_output import RowFetch
from lookonce import tracing
from lookonce.content_key import ContentKey, ProcessorOptions
from lookonce.errors import EmbeddingNotCachedError, InternalError, LookonceError, UnavailableError
from lookonce.image_file import ImageFile
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.threads import run_in_thread
from lookonce.turns.caller_order import CallerOrder, Turn
from lookonce.uncounted_rows import UncountedRows

logger = logging.getLogger(__name__)

_MAX_TOUCH_INTERVAL_S = 60.0
_TOUCHES_PER_LIFE = 4
# Most encodes of one image whose rows can be read neither from the shared cache nor from another replica.
_MAX_ENCODES = 6
# Encodes that may be answered from the encoder's caches. Later ones force a new encode: the cached entry seems broken.
_TRUSTING_ENCODES = 2


class EmbeddingFetcher:
    """Owns the fetches in flight. Call all methods on the event loop; reads of the shared cache run in threads."""

    def __init__(
        self,
        store: EmbeddingStore | None,
        encoder: EncoderClient | None,
        *,
        num_workers: int,
        timeout_s: float,
        ttl_s: float,
        metrics: FetchMetrics,
    ) -> None:
        """`ttl_s`: lifetime of a shared cache entry. Reading an entry extends it, a few times per lifetime at most."""
        self._store = store
        self._encoder = encoder
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="row-fetch")
        self._tasks: set[asyncio.Task[None]] = set()
        self._order: CallerOrder[RequestId] = CallerOrder()
        # Rows that an encoder computed for fetches here that have not delivered them, or failed since.
        self._uncounted = UncountedRows()
        self._touches = TtlRefresher(self._touch, min(_MAX_TOUCH_INTERVAL_S, ttl_s / _TOUCHES_PER_LIFE))

    def start(
        self,
        fetch: RowFetch,
        on_arrived: Callable[[FetchedRows], None],
        on_failed: Callable[[RowFetch, LookonceError], None],
    ) -> None:
        """Starts one fetch. Calls exactly one of the two callbacks, on the event loop.

        The missing images of one request reach the encoder in the order of these calls.
        """
        task = asyncio.get_running_loop().create_task(self._run(fetch, on_arrived, on_failed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancels all fetches in flight and releases the threads."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._touches.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(
        self,
        fetch: RowFetch,
        on_arrived: Callable[[FetchedRows], None],
        on_failed: Callable[[RowFetch, LookonceError], None],
    ) -> None:
        started_s = time.monotonic()
        self._metrics.begun(len(fetch.rows))
        try:
            with self._order.entered(fetch.request_id) as turn, _span(fetch):
                async with asyncio.timeout(self._timeout_s):
                    rows, tier = await self._fetch(fetch, turn)
                tracing.annotate(
                    tier=tier.value, source="encoded" if rows.num_encoded_rows else "shared", num_bytes=len(rows.data)
                )
        except LookonceError as error:
            self._fail(fetch, error, on_failed)
        except TimeoutError:
            late = UnavailableError(f"an image's embedding did not arrive within {self._timeout_s:g} s")
            self._fail(fetch, late, on_failed)
        except Exception:
            incident = uuid.uuid4().hex
            logger.exception("fetch of embedding rows failed, incident %s", incident)
            self._fail(fetch, InternalError(f"internal error {incident}"), on_failed)
        else:
            self._metrics.arrived(tier, len(rows.rows), len(rows.data), time.monotonic() - started_s)
            on_arrived(rows)

    def _fail(
        self, fetch: RowFetch, error: LookonceError, on_failed: Callable[[RowFetch, LookonceError], None]
    ) -> None:
        self._metrics.failed()
        on_failed(fetch, error)

    async def _fetch(self, fetch: RowFetch, turn: Turn[RequestId]) -> tuple[FetchedRows, FetchTier]:
        if self._encoder is None:
            raise UnavailableError("this decoder has no encoder; it serves text only")
        info = await self._encoder.info()
        if info.fingerprint != fetch.key.fingerprint:
            # The prompt was laid out for the previous encoder's rows; the new one may give other shapes.
            raise UnavailableError("the encoder was replaced while the request waited; send it again")
        buffer = bytearray(len(fetch.rows) * info.row_bytes)
        if await self._read_shared(fetch, buffer):
            self._touches.note(fetch.key, fetch.options)
            return self._delivered(fetch, buffer, info), FetchTier.SHARED
        if fetch.data is not None:
            await turn.wait()
            turn.pass_on()
            return await self._encode(self._encoder, fetch, fetch.data, info, buffer), FetchTier.ENCODER
        await self._read_rows(self._encoder, fetch, buffer)
        return self._delivered(fetch, buffer, info), FetchTier.ENCODER

    async def _encode(
        self, encoder: EncoderClient, fetch: RowFetch, data: ImageFile, info: EncoderInfo, buffer: bytearray
    ) -> FetchedRows:
        for number in range(_MAX_ENCODES):
            refresh = number >= _TRUSTING_ENCODES
            encoded = await encoder.encode(
                fetch.key, data, fetch.options, self._timeout_s, refresh=refresh, removal_token=fetch.removal_token
            )
            if encoded.was_computed:
                self._uncounted.add(fetch.key.value, encoded.meta.num_rows)
            if encoded.meta.num_rows != fetch.num_image_rows:
                raise InternalError("the encoder returned a different number of rows than the prompt has placeholders")
            if encoded.meta.dtype is not info.dtype:
                raise UnavailableError("the encoder service changed the element type of its rows; retry")
            if encoded.stored and await self._read_shared(fetch, buffer):
                return self._delivered(fetch, buffer, info)
            if encoded.rows is not None:
                buffer[:] = encoded.rows[fetch.rows.start * info.row_bytes : fetch.rows.stop * info.row_bytes]
                return self._delivered(fetch, buffer, info)
            # The shared cache has lost the rows or does not answer. Read calls rotate over the encoder replicas. Each
            # round makes one call more, so one reaches the replica that encoded the image, for any replica count.
            for _ in range(number + 1):
                with contextlib.suppress(EmbeddingNotCachedError):
                    await self._read_rows(encoder, fetch, buffer)
                    return self._delivered(fetch, buffer, info)
        raise UnavailableError(f"an image's embedding was lost {_MAX_ENCODES} times before it could be read; retry")

    def _delivered(self, fetch: RowFetch, buffer: bytearray, info: EncoderInfo) -> FetchedRows:
        num_encoded_rows = self._uncounted.take(fetch.key.value)
        return FetchedRows(fetch.key, fetch.rows, buffer, info.dtype, info.num_levels, num_encoded_rows)

    async def _read_rows(self, encoder: EncoderClient, fetch: RowFetch, buffer: bytearray) -> None:
        await encoder.read_rows(
            fetch.key, fetch.rows.start, fetch.rows.stop, memoryview(buffer), self._timeout_s, options=fetch.options
        )

    async def _touch(self, keys: Sequence[ContentKey], options: ProcessorOptions) -> None:
        if self._encoder is not None:
            await self._encoder.touch(keys, options)

    async def _read_shared(self, fetch: RowFetch, buffer: bytearray) -> bool:
        """Reads verified rows from the shared cache into the buffer. Returns whether it had them."""
        if self._store is None:
            return False
        miss = await run_in_thread(
            self._threads,
            self._store.read_rows,
            fetch.key,
            fetch.rows.start,
            fetch.rows.stop,
            memoryview(buffer),
            num_rows=fetch.num_image_rows,
        )
        return miss is None


def _span(fetch: RowFetch) -> tracing.SpanBlock:
    return tracing.span("generate.fetch", num_rows=len(fetch.rows), num_image_rows=fetch.num_image_rows)
