"""Each image is encoded once however many ask, whatever the cache does, and a refusal leaves the pipeline unchanged."""

from __future__ import annotations

import asyncio
import os
import pathlib
import random
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from encoder_svc.cache.cache_admin import CacheAdmin
from encoder_svc.cache.cache_control import CacheControl
from encoder_svc.cache.cache_tiers import CacheTiers
from encoder_svc.cache.encode_job import CachePolicy, EncodeOutcome, ImageInput, Origin
from encoder_svc.cache.image_encoder import ImageEncoder
from encoder_svc.cache.local_cache import LocalCache, LocalEmbedding
from encoder_svc.cache.pipeline import EncodePipeline
from encoder_svc.cache.queue_places import QueuePlaces
from encoder_svc.images.image_inputs import PixelInputs
from encoder_svc.images.pixel_budget import PixelBudget
from encoder_svc.images.preprocess import Preprocessor
from encoder_svc.images.quarantine import Quarantine, Stage
from encoder_svc.metrics import EncoderMetrics
from encoder_svc.vision.batcher import BatchLimits, ForwardBatcher
from encoder_svc.vision.forward_queue import ForwardJob, ForwardQueue
from encoder_svc.vision.vision_model import VisionModel, row_bytes
from lookonce import tracing
from lookonce.content_key import DEFAULT_TENANT, ContentKey, ProcessorOptions, Tenant, image_digest
from lookonce.errors import (
    DigestMismatchError,
    EmbeddingNotCachedError,
    FingerprintMismatchError,
    ImageTooLargeError,
    ImageUndecodableError,
    InvalidParameterError,
    OverloadedError,
)
from lookonce.forgotten import EVERYTHING
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.media.image_header import ImageLimits
from lookonce.process.process_clock import TimeLimits
from lookonce.store.embedding_store import EmbeddingStore
from lookonce.turns import caller_order
from tests import image_files
from tests.allocated_memory import nothing_left
from tests.lookonce.store.entries import remove, write
from tests.otlp_collector import traced_process

LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=1_000_000, max_aspect=50.0)
TIMEOUT_S = 30


@dataclass(slots=True)
class Harness:
    """A pipeline on a real model, with a gate in front of the forward pass."""

    pipeline: EncodePipeline
    store: EmbeddingStore | None
    # While it is set, forward passes may run.
    gate: threading.Event
    # Size of each forward pass.
    passes: list[int]

    @property
    def num_encoded(self) -> int:
        """Number of images that went through the model."""
        return sum(self.passes)

    @property
    def num_waiting(self) -> int:
        """Number of callers that wait for images in flight."""
        return sum(len(flight._results) for flight in self.pipeline._flights._flights.values())

    async def encode(
        self, data: bytes, cache_policy: CachePolicy = CachePolicy.READ_AND_WRITE, **fields: Any
    ) -> EncodeOutcome:
        """Encodes an image file, for the default tenant unless told otherwise."""
        image = ImageInput(data, fields.get("digest"), fields.get("options", ProcessorOptions()))
        tenant, charge_pixels = fields.get("tenant", DEFAULT_TENANT), fields.get("charge_pixels")
        return await self.pipeline.encode(image, cache_policy, tenant, "me", charge_pixels)

    async def find(self, data: bytes, **fields: Any) -> EncodeOutcome:
        """Asks for an image by its digest."""
        image = ImageInput(None, image_digest(data), fields.get("options", ProcessorOptions()))
        use = fields.get("cache_policy", CachePolicy.READ_AND_WRITE)
        return await self.pipeline.encode(image, use, fields.get("tenant", DEFAULT_TENANT), "me")

    async def rows(self, outcome: EncodeOutcome) -> bytes:
        """All rows of an outcome."""
        return bytes((await self.pipeline.read(outcome.key, 0, 0)).rows)


@pytest.fixture
def open_harness(vision_model: Callable[[str], VisionModel]) -> Callable[..., Any]:
    """Opens a pipeline, as in `async with open_harness(redis_url=…) as harness`; its gate is open."""

    @asynccontextmanager
    async def open_one(
        redis_url: str | None = None,
        *,
        redis_budget_s: float = 5.0,
        local_bytes: int = 1 << 20,
        max_queued: int = 100,
        max_prepared_bytes: int = 1 << 30,
        name: str = "llava_clip",
    ) -> AsyncIterator[Harness]:
        model = vision_model(name)
        metrics = EncoderMetrics(CollectorRegistry())
        gate, passes = threading.Event(), list[int]()
        gate.set()

        def forward(batch: Sequence[PixelInputs]) -> list[torch.Tensor]:
            assert gate.wait(TIMEOUT_S)
            passes.append(len(batch))
            return model.forward(batch)

        store = None if redis_url is None else EmbeddingStore(redis_url, redis_budget_s, 60, 1 << 20)
        encoder = ImageEncoder(
            model,
            Preprocessor(model.adapter, LIMITS, 2, TimeLimits(60.0, 120.0), Quarantine(Stage.DECODE, metrics)),
            ForwardBatcher(forward, model.warm_up, BatchLimits(8, 1 << 26, max_queued), metrics),
            metrics,
            places=QueuePlaces(max_queued),
            budget=PixelBudget(max_prepared_bytes, 2),
            quarantine=Quarantine(Stage.FORWARD, metrics),
        )
        tiers = CacheTiers(LocalCache(local_bytes), store, metrics, num_threads=2)
        pipeline = EncodePipeline(model, encoder, tiers, None, LIMITS, metrics)
        try:
            yield Harness(pipeline, store, gate, passes)
        finally:
            gate.set()
            await pipeline.close()
            if store is not None:
                store.close()

    return open_one


def png(seed: int, width: int = 80, height: int = 60) -> bytes:
    """An image file that differs between seeds."""
    return image_files.encoded(image_files.noise(seed, width, height))


async def settled(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_an_image_is_encoded_once_and_found_afterwards(
    open_harness: Callable[..., Any], own_redis: EmbeddedRedis
) -> None:
    async with open_harness(own_redis.url) as first:
        computed = await first.encode(png(1))
        assert (computed.origin, computed.stored) == (Origin.COMPUTED, True)
        assert computed.compute_s > 0
        assert (computed.meta.num_rows, computed.meta.image_width, computed.meta.image_height) == (16, 80, 60)
        again = await first.encode(png(1))
        assert (again.origin, again.stored, again.compute_s) == (Origin.LOCAL_CACHE, True, 0.0)
        rows = await first.rows(computed)
    async with open_harness(own_redis.url) as other:
        shared = await other.encode(png(1))
        assert (shared.origin, shared.stored, shared.meta) == (Origin.SHARED_CACHE, True, computed.meta)
        assert await other.rows(shared) == rows
        assert other.num_encoded == 0


async def test_rows_are_those_of_the_model(
    open_harness: Callable[..., Any], vision_model: Callable[[str], VisionModel]
) -> None:
    model = vision_model("llava_clip")
    image = image_files.noise(3)
    expected = model.forward([model.adapter.pixel_inputs(image, ProcessorOptions())])[0]
    async with open_harness() as harness:
        outcome = await harness.encode(image_files.encoded(image))
        assert await harness.rows(outcome) == bytes(row_bytes(expected))
        part = await harness.pipeline.read(outcome.key, 3, 5)
        assert part.start == 3
        assert bytes(part.rows) == bytes(row_bytes(expected[3:8].contiguous()))


async def test_fifty_callers_cost_one_encode(open_harness: Callable[..., Any], own_redis: EmbeddedRedis) -> None:
    async with open_harness(own_redis.url) as harness:
        outcomes = await asyncio.gather(*(harness.encode(png(1)) for _ in range(50)))
        assert harness.num_encoded == 1
        assert [outcome.origin for outcome in outcomes].count(Origin.COMPUTED) == 1
        assert {outcome.origin for outcome in outcomes} <= {Origin.COMPUTED, Origin.COALESCED}
        assert {outcome.stored for outcome in outcomes} == {True}


async def test_cancelled_callers_the_first_included_leave_the_others_unharmed(open_harness: Callable[..., Any]) -> None:
    async with open_harness() as harness:
        harness.gate.clear()
        callers = [asyncio.create_task(harness.encode(png(1))) for _ in range(50)]
        await settled(lambda: harness.pipeline._encoder._batcher.running_s > 0)
        for caller in callers[:25]:
            caller.cancel()
        await asyncio.wait(callers[:25])
        harness.gate.set()
        outcomes = await asyncio.gather(*callers[25:])
        origins = [outcome.origin for outcome in outcomes]
        assert (origins.count(Origin.COMPUTED), origins.count(Origin.COALESCED)) == (1, 24)
        assert harness.num_encoded == 1


async def test_work_that_everybody_left_is_still_finished(open_harness: Callable[..., Any]) -> None:
    async with open_harness() as harness:
        harness.gate.clear()
        caller = asyncio.create_task(harness.encode(png(1)))
        await settled(lambda: harness.pipeline._encoder._batcher.running_s > 0)
        caller.cancel()
        await asyncio.wait([caller])
        harness.gate.set()
        await settled(lambda: harness.num_encoded == 1)
        assert (await harness.find(png(1))).origin in (Origin.COALESCED, Origin.LOCAL_CACHE)


async def test_an_image_that_waits_is_dropped_with_its_bytes_when_everybody_has_left(
    open_harness: Callable[..., Any],
) -> None:
    """Images wait for a decoding process, for room for their pixels, and for a forward pass."""
    megabytes = [image_files.encoded(image_files.noise(seed, 580, 580)) for seed in range(20)]
    async with open_harness() as harness:
        encoder = harness.pipeline._encoder
        harness.gate.clear()
        first = asyncio.create_task(harness.encode(png(1)))
        await settled(lambda: encoder._batcher.running_s > 0)
        # Two more are prepared, because the first alone does not use the budget up.
        encoder._budget._max_bytes = encoder._budget.num_bytes + 1
        with nothing_left(1 << 20):
            callers = [asyncio.create_task(harness.encode(bytes(bytearray(data)))) for data in megabytes]
            await settled(lambda: len(encoder._batcher._queue) == 2 and len(encoder._budget._grants._waiting) == 18)
            for caller in callers:
                caller.cancel()
            await asyncio.wait(callers)
            callers.clear()
            await settled(lambda: len(harness.pipeline._flights) == 1)
        assert (len(encoder._batcher._queue), len(encoder._budget._grants._waiting), len(encoder._places)) == (0, 0, 1)
        again = asyncio.create_task(harness.encode(megabytes[0]))
        await settled(lambda: len(encoder._batcher._queue) == 1)
        harness.gate.set()
        assert [(await task).origin for task in (first, again)] == [Origin.COMPUTED] * 2
        assert harness.num_encoded == 2


@pytest.mark.parametrize("seed", range(4))
async def test_whoever_joins_and_leaves_an_image_is_encoded_once(
    seed: int, open_harness: Callable[..., Any], own_redis: EmbeddedRedis
) -> None:
    rng = random.Random(seed)
    async with open_harness(own_redis.url, max_prepared_bytes=1) as harness:
        callers: list[tuple[int, asyncio.Task[EncodeOutcome]]] = []
        for _ in range(150):
            choice = rng.random()
            if choice < 0.5:
                number = rng.randrange(6)
                callers.append((number, asyncio.create_task(harness.encode(png(number)))))
            elif choice < 0.8 and callers:
                callers.pop(rng.randrange(len(callers)))[1].cancel()
            elif choice < 0.9:
                harness.gate.set() if rng.random() < 0.5 else harness.gate.clear()
            await asyncio.sleep(rng.choice((0, 0, 0.001, 0.01)))
        harness.gate.set()
        outcomes = [await task for _, task in callers]
        await settled(lambda: not len(harness.pipeline._flights))
        keys = {outcome.key for outcome in outcomes}
        assert len(keys) <= harness.num_encoded <= 6
        assert len(harness.pipeline._encoder._places) == harness.pipeline._encoder._budget.num_bytes == 0


async def test_an_encode_that_everybody_left_is_reported_to_the_next_caller_with_the_bytes(
    open_harness: Callable[..., Any], own_redis: EmbeddedRedis
) -> None:
    """A call is repeated after its connection was lost: it reports the encode that the first try began."""
    async with open_harness(own_redis.url) as harness:
        harness.gate.clear()
        caller = asyncio.create_task(harness.encode(png(1)))
        await settled(lambda: harness.pipeline._encoder._batcher.running_s > 0)
        caller.cancel()
        await asyncio.wait([caller])
        harness.gate.set()
        await settled(lambda: harness.num_encoded == 1 and not len(harness.pipeline._flights))
        assert (await harness.find(png(1))).origin is Origin.LOCAL_CACHE
        assert (await harness.encode(png(1), CachePolicy.ONLY_IF_CACHED)).origin is Origin.LOCAL_CACHE
        assert [(await harness.encode(png(1))).origin for _ in range(2)] == [Origin.COMPUTED, Origin.LOCAL_CACHE]
        assert harness.num_encoded == 1


async def test_each_refresh_is_reported_once(open_harness: Callable[..., Any]) -> None:
    async with open_harness() as harness:
        uses = [CachePolicy.REFRESH, CachePolicy.READ_AND_WRITE] * 10
        outcomes = await asyncio.gather(*(harness.encode(png(1), use) for use in uses))
        assert [outcome.origin for outcome in outcomes].count(Origin.COMPUTED) == harness.num_encoded


async def test_a_reference_waits_for_the_encode_in_flight(open_harness: Callable[..., Any]) -> None:
    async with open_harness() as harness:
        harness.gate.clear()
        sender = asyncio.create_task(harness.encode(png(1)))
        await settled(lambda: harness.pipeline._encoder._batcher.running_s > 0)
        asker = asyncio.create_task(harness.find(png(1)))
        await settled(lambda: harness.num_waiting == 2)
        harness.gate.set()
        assert (await sender).origin is Origin.COMPUTED
        assert (await asker).origin is Origin.COALESCED


async def test_a_reference_to_a_broken_image_in_flight_is_simply_not_cached(open_harness: Callable[..., Any]) -> None:
    broken = png(1)[:-200]
    async with open_harness() as harness:
        sender = asyncio.create_task(harness.encode(broken))
        await asyncio.sleep(0)
        with pytest.raises(EmbeddingNotCachedError):
            await harness.find(broken)
        with pytest.raises(ImageUndecodableError):
            await sender


async def test_nothing_is_found_before_it_was_encoded(
    open_harness: Callable[..., Any], own_redis: EmbeddedRedis
) -> None:
    async with open_harness(own_redis.url) as harness:
        for attempt in (harness.find(png(1)), harness.encode(png(1), CachePolicy.ONLY_IF_CACHED)):
            with pytest.raises(EmbeddingNotCachedError):
                await attempt
        assert harness.num_encoded == 0
        await harness.encode(png(1))
        assert (await harness.find(png(1))).origin is Origin.LOCAL_CACHE
        assert (await harness.encode(png(1), CachePolicy.ONLY_IF_CACHED)).origin is Origin.LOCAL_CACHE


async def test_refresh_encodes_again_and_overwrites(open_harness: Callable[..., Any], own_redis: EmbeddedRedis) -> None:
    async with open_harness(own_redis.url) as harness:
        outcome = await harness.encode(png(1))
        rows = await harness.rows(outcome)
        wrong = memoryview(bytes(len(rows)))
        assert remove(harness.store, outcome.key)
        assert write(harness.store, outcome.key, outcome.meta, wrong)
        refreshed = await harness.encode(png(1), CachePolicy.REFRESH)
        assert (refreshed.origin, refreshed.stored) == (Origin.COMPUTED, True)
        stored = memoryview(bytearray(len(rows)))
        assert harness.store.read_rows(outcome.key, 0, outcome.meta.num_rows, stored) is None
        assert bytes(stored) == rows
        assert harness.num_encoded == 2
        with pytest.raises(InvalidParameterError, match="cache_policy"):
            await harness.find(png(1), cache_policy=CachePolicy.REFRESH)


async def test_an_entry_that_left_the_shared_cache_is_written_again(
    open_harness: Callable[..., Any], own_redis: EmbeddedRedis
) -> None:
    async with open_harness(own_redis.url) as harness:
        outcome = await harness.encode(png(1))
        assert remove(harness.store, outcome.key)
        again = await harness.encode(png(1))
        assert (again.origin, again.stored) == (Origin.LOCAL_CACHE, True)
        assert harness.store.stat(outcome.key) == outcome.meta
        assert harness.num_encoded == 1


async def test_without_redis_rows_are_read_from_this_process(open_harness: Callable[..., Any]) -> None:
    async with open_harness() as harness:
        outcome = await harness.encode(png(1))
        assert not outcome.stored
        assert len(await harness.rows(outcome)) == outcome.meta.size_bytes


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_losing_redis_costs_neither_answers_nor_rows(
    fault: signal.Signals, open_harness: Callable[..., Any], own_redis: EmbeddedRedis
) -> None:
    async with open_harness(own_redis.url, redis_budget_s=0.5) as harness:
        before = await harness.encode(png(1))
        os.kill(own_redis.pid, fault)
        after = await harness.encode(png(2))
        assert (after.origin, after.stored) == (Origin.COMPUTED, False)
        for outcome in (before, after):
            assert len(await harness.rows(outcome)) == outcome.meta.size_bytes
        again = await harness.encode(png(1))
        assert (again.origin, again.stored) == (Origin.LOCAL_CACHE, False)


async def test_a_full_queue_refuses_new_images_but_neither_hits_nor_joiners(open_harness: Callable[..., Any]) -> None:
    async with open_harness(max_queued=2) as harness:
        await harness.encode(png(0))
        harness.gate.clear()
        busy = [asyncio.create_task(harness.encode(png(seed))) for seed in (1, 2)]
        await settled(lambda: len(harness.pipeline._encoder._places) == 2)
        with pytest.raises(OverloadedError, match="2 images"):
            await harness.encode(png(3))
        assert (await harness.encode(png(0))).origin is Origin.LOCAL_CACHE
        joiner = asyncio.create_task(harness.encode(png(1)))
        await settled(lambda: harness.num_waiting == 3)
        harness.gate.set()
        assert [outcome.origin for outcome in await asyncio.gather(*busy)] == [Origin.COMPUTED] * 2
        assert (await joiner).origin is Origin.COALESCED
        assert (await harness.encode(png(3))).origin is Origin.COMPUTED


async def test_pixels_that_wait_for_the_model_are_bounded_by_their_bytes(
    open_harness: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_harness(max_prepared_bytes=1) as harness:
        prepared: list[bytes] = []
        prepare = harness.pipeline._encoder._preprocessor._prepare

        def noted(data: bytes, *others: Any) -> Any:
            prepared.append(data)
            return prepare(data, *others)

        monkeypatch.setattr(harness.pipeline._encoder._preprocessor, "_prepare", noted)
        harness.gate.clear()
        waiting = [asyncio.create_task(harness.encode(png(seed))) for seed in range(1, 7)]
        await settled(lambda: len(prepared) == 2)
        await asyncio.sleep(0.1)
        assert len(prepared) == 2, "as many as are prepared at a time pass the bound"
        leaving = waiting.pop(0)
        leaving.cancel()
        harness.gate.set()
        assert {outcome.origin for outcome in await asyncio.gather(*waiting)} == {Origin.COMPUTED}
        # The image whose caller has left was in the forward pass, or is dropped.
        await settled(lambda: not len(harness.pipeline._flights))
        assert (len(prepared), harness.num_encoded) in ((6, 5), (6, 6))
        with pytest.raises(ImageUndecodableError):
            await harness.encode(b"no image")
        assert (await harness.encode(png(9))).origin is Origin.COMPUTED
        assert harness.pipeline._encoder._budget.num_bytes == 0


async def test_a_wrong_digest_stores_nothing(open_harness: Callable[..., Any], own_redis: EmbeddedRedis) -> None:
    async with open_harness(own_redis.url) as harness:
        with pytest.raises(DigestMismatchError):
            await harness.encode(png(1), digest=image_digest(png(2)))
        for seed in (1, 2):
            with pytest.raises(EmbeddingNotCachedError):
                await harness.find(png(seed))
        assert (await harness.encode(png(1), digest=image_digest(png(1)))).origin is Origin.COMPUTED


async def test_large_files_are_refused_before_they_are_hashed_or_decoded(open_harness: Callable[..., Any]) -> None:
    async with open_harness() as harness:
        with pytest.raises(ImageTooLargeError, match="1048577 bytes"):
            await harness.encode(bytes((1 << 20) + 1))
        with pytest.raises(ImageTooLargeError, match="40000 × 40000"):
            await harness.encode(image_files.png_of_size(40_000, 40_000))


async def test_tenants_and_options_do_not_share_rows(open_harness: Callable[..., Any]) -> None:
    small = ProcessorOptions(max_pixels=4 * 28 * 28)
    stranger = Tenant("stranger", b"another secret")
    async with open_harness(name="qwen2_vl") as harness:
        mine = await harness.encode(png(1, 200, 100))
        for fields in ({"tenant": stranger}, {"options": small}):
            with pytest.raises(EmbeddingNotCachedError):
                await harness.find(png(1, 200, 100), **fields)
        theirs = await harness.encode(png(1, 200, 100), tenant=stranger)
        smaller = await harness.encode(png(1, 200, 100), options=small)
        assert [outcome.origin for outcome in (theirs, smaller)] == [Origin.COMPUTED] * 2
        assert len({outcome.key.value for outcome in (mine, theirs, smaller)}) == 3
        assert smaller.meta.num_rows < mine.meta.num_rows == theirs.meta.num_rows
        for attempt in (harness.encode, harness.find):
            with pytest.raises(InvalidParameterError, match="max_pixels"):
                await attempt(png(1), options=ProcessorOptions(max_pixels=1))


@pytest.mark.parametrize(("row_offset", "row_count", "field"), [(16, 0, "row_offset"), (10, 7, "row_count")])
@pytest.mark.parametrize("local_bytes", [0, 1 << 20])
async def test_rows_outside_of_the_embedding_are_refused(
    row_offset: int,
    row_count: int,
    field: str,
    local_bytes: int,
    open_harness: Callable[..., Any],
    own_redis: EmbeddedRedis,
) -> None:
    async with open_harness(own_redis.url, local_bytes=local_bytes) as harness:
        outcome = await harness.encode(png(1))
        with pytest.raises(InvalidParameterError, match=field):
            await harness.pipeline.read(outcome.key, row_offset, row_count)


async def test_a_foreign_fingerprint_is_refused(open_harness: Callable[..., Any]) -> None:
    async with open_harness() as harness:
        harness.pipeline.check_fingerprint("")
        harness.pipeline.check_fingerprint(harness.pipeline.model.fingerprint)
        with pytest.raises(FingerprintMismatchError):
            harness.pipeline.check_fingerprint("0" * 64)


async def test_closing_ends_work_in_flight(open_harness: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    async with open_harness() as harness:
        harness.gate.clear()
        caller = asyncio.create_task(harness.encode(png(1)))
        await settled(lambda: harness.pipeline._encoder._batcher.running_s > 0)
        closing = asyncio.create_task(harness.pipeline.close())
        await asyncio.wait([caller])
        assert caller.cancelled()
        harness.gate.set()
        await closing


async def test_a_caller_s_images_reach_the_model_in_the_order_of_asking(
    open_harness: Callable[..., Any], own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Makes the order independent of the machine's speed.
    monkeypatch.setattr(caller_order, "_MAX_WAIT_S", float(TIMEOUT_S))
    queued: list[int] = []
    put = ForwardQueue.put

    def noted(queue: ForwardQueue, job: ForwardJob) -> None:
        queued.append(job.number)
        put(queue, job)

    monkeypatch.setattr(ForwardQueue, "put", noted)
    async with open_harness(own_redis.url) as harness:
        for seed in range(5):
            async with asyncio.TaskGroup() as tasks:
                # The second is decoded long before the first.
                for data in (png(seed, 1000, 300), png(seed)):
                    tasks.create_task(harness.encode(data))
    assert queued == list(range(10))


async def test_calls_of_two_tenants_with_one_request_id_do_not_wait_for_each_other(
    open_harness: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller_order, "_MAX_WAIT_S", float(TIMEOUT_S))
    slow, is_decoded = png(1), threading.Event()
    async with open_harness() as harness:
        preprocessor = harness.pipeline._encoder._preprocessor
        prepare = preprocessor._prepare

        def prepared(data: bytes, *others: Any) -> Any:
            assert data != slow or is_decoded.wait(TIMEOUT_S)
            return prepare(data, *others)

        monkeypatch.setattr(preprocessor, "_prepare", prepared)
        waiting = asyncio.create_task(harness.encode(slow))
        await settled(lambda: len(harness.pipeline._encoder._places) == 1)
        async with asyncio.timeout(TIMEOUT_S / 2):
            await harness.encode(png(2), tenant=Tenant("stranger", b"another secret"))
        is_decoded.set()
        await waiting


async def test_a_tenant_s_files_are_not_all_read_before_those_of_another_tenant(
    open_harness: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, other, gate = [png(seed) for seed in range(20)], png(99), threading.Event()
    read: list[bytes] = []
    async with open_harness() as harness:
        preprocessor = harness.pipeline._encoder._preprocessor
        read_header = preprocessor.read_header

        def noted(data: bytes, options: ProcessorOptions) -> Any:
            read.append(data)
            assert gate.wait(TIMEOUT_S)
            return read_header(data, options)

        monkeypatch.setattr(preprocessor, "read_header", noted)
        waiting = [asyncio.create_task(harness.encode(data)) for data in files]
        await settled(lambda: len(harness.pipeline._encoder._places) == 20)
        num_begun = len(read)
        waiting.append(asyncio.create_task(harness.encode(other, tenant=Tenant("stranger", b"another secret"))))
        await settled(lambda: len(harness.pipeline._encoder._places) == 21)
        gate.set()
        await asyncio.gather(*waiting)
        assert read.index(other) <= num_begun + 1


async def test_images_of_one_pass_have_spans_in_the_traces_of_their_own_calls(open_harness: Callable[..., Any]) -> None:
    async def call(harness: Harness, seed: int) -> None:
        with tracing.calling(f"call {seed}"):
            await harness.encode(png(seed))

    with traced_process() as traces:
        async with open_harness() as harness:
            harness.gate.clear()
            batcher = harness.pipeline._encoder._batcher
            async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
                group.create_task(call(harness, 0))
                await settled(lambda: batcher.running_s > 0)
                for seed in (1, 2):
                    group.create_task(call(harness, seed))
                await settled(lambda: len(batcher._queue) == 2)
                harness.gate.set()
            assert harness.passes == [1, 2]
        told = await asyncio.to_thread(traces.collected)
    passes = {span.trace_id: span for span in told.named("encode.forward")}
    num_together = {}
    for seed in range(3):
        root = told.one(f"call {seed}")
        own = [span for span in told.spans if span.trace_id == root.trace_id and span is not root]
        assert sorted(span.name for span in own) == ["encode.decode_image", "encode.forward", "encode.preprocess"]
        assert {span.parent_id for span in own} == {root.span_id}
        num_together[seed] = passes[root.trace_id].attributes["lookonce.num_images"]
    assert num_together == {0: 1, 1: 2, 2: 2}


async def test_pixels_are_charged_for_each_image_that_is_sent_before_it_is_decoded(
    open_harness: Callable[..., Any],
) -> None:
    charged: list[int] = []

    def refuse(num_pixels: int) -> None:
        raise OverloadedError(f"{num_pixels} are too many")

    async with open_harness() as harness:
        # Its pixels are missing, but its header claims them.
        with pytest.raises(ImageUndecodableError):
            await harness.encode(image_files.png_of_size(700, 600), charge_pixels=charged.append)
        for _ in range(2):
            await harness.encode(png(1), charge_pixels=charged.append)
        await harness.find(png(1))
        assert charged == [420_000, 4800, 4800]
        with pytest.raises(OverloadedError, match="4800"):
            await harness.encode(png(2), charge_pixels=refuse)
        assert harness.num_encoded == 1


async def test_an_upload_that_was_being_encoded_during_a_removal_gets_its_rows_and_no_cache_keeps_them(
    open_harness: Callable[..., Any], own_redis: EmbeddedRedis
) -> None:
    async with open_harness(own_redis.url) as harness:
        tiers, fingerprint = harness.pipeline.tiers, harness.pipeline.model.fingerprint
        control = CacheControl(tiers, CacheAdmin(own_redis.url), fingerprint, ttl_s=60, restore_s=0.0)
        key = harness.pipeline.key_of(image_digest(png(1)), ProcessorOptions(), DEFAULT_TENANT)
        harness.gate.clear()
        # Another caller, who knows the digest only, came before the removal.
        callers = [asyncio.create_task(harness.encode(png(1)))]
        await settled(lambda: harness.pipeline._encoder._batcher.running_s > 0)
        callers.append(asyncio.create_task(harness.find(png(1))))
        await settled(lambda: len(next(iter(harness.pipeline._flights._flights.values()))._results) == len(callers))
        assert (await control.evict([key.digest], [key], DEFAULT_TENANT)).num_entries == 0
        # One who brings the bytes afterwards joins the encode. One who knows the digest only finds nothing.
        callers.append(asyncio.create_task(harness.encode(png(1))))
        with pytest.raises(EmbeddingNotCachedError):
            await harness.find(png(1))
        harness.gate.set()
        outcomes = await asyncio.gather(*callers)
        assert [outcome.origin for outcome in outcomes] == [Origin.COMPUTED, Origin.COALESCED, Origin.COALESCED]
        assert len({bytes(outcome.rows) for outcome in outcomes}) == 1
        assert not any(outcome.stored for outcome in outcomes)
        assert not tiers.holds(key)
        assert await asyncio.to_thread(harness.store.stat, key) is None
        again = await harness.encode(png(1))
        assert (again.stored, again.rows, harness.num_encoded) == (True, None, 2)
        assert await harness.rows(again) == bytes(outcomes[0].rows)
        await asyncio.to_thread(control.close)


async def test_a_copy_that_is_removed_while_it_is_looked_at_comes_with_the_answer(
    open_harness: Callable[..., Any], own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_harness(own_redis.url) as harness:
        tiers = harness.pipeline.tiers
        rows = await harness.rows(await harness.encode(png(1)))

        async def removed_meanwhile(_key: ContentKey, _entry: LocalEmbedding) -> bool:
            tiers.forget(EVERYTHING)
            return False

        monkeypatch.setattr(tiers, "keep_stored", removed_meanwhile)
        outcome = await harness.encode(png(1))
        assert (outcome.origin, outcome.stored) == (Origin.LOCAL_CACHE, False)
        assert bytes(outcome.rows) == rows


async def test_a_digest_is_looked_up_before_another_tenant_s_backlog(
    open_harness: Callable[..., Any], own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_harness(own_redis.url) as harness:
        asked: list[str] = []
        find = harness.pipeline.tiers.find_local

        def find_local(key: ContentKey) -> LocalEmbedding | None:
            asked.append(key.tenant_tag)
            entry: LocalEmbedding | None = find(key)
            return entry

        monkeypatch.setattr(harness.pipeline.tiers, "find_local", find_local)

        async def ask(tenant: Tenant, name: str) -> None:
            image = ImageInput(None, image_digest(name.encode()), ProcessorOptions())
            with pytest.raises(EmbeddingNotCachedError):
                await harness.pipeline.encode(image, CachePolicy.READ_AND_WRITE, tenant, name)

        many = [asyncio.create_task(ask(Tenant("a", b"one"), str(number))) for number in range(500)]
        await asyncio.sleep(0)
        await ask(Tenant("b", b"two"), "small")
        assert len(asked) < 50
        await asyncio.gather(*many)
        assert len(asked) == 501
