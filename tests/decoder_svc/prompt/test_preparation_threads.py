"""Tenants take turns in the preparation of prompts, piece by piece, and no piece is lost, whoever leaves."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
import types
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from decoder_svc.constraint.constraint_checker import ConstraintChecker
from decoder_svc.prompt import image_resolver, preparation_threads, video_frames
from decoder_svc.prompt.chat_tools import ChatTools
from decoder_svc.prompt.image_resolver import ImageResolver
from decoder_svc.prompt.preparation import RequestPreparer
from decoder_svc.prompt.preparation_threads import PreparationThreads
from decoder_svc.prompt.prompt_builder import PromptBuilder, PromptLimits
from decoder_svc.prompt.prompt_spec import (
    ChatMessage,
    ChatPrompt,
    ChatRole,
    ImagePart,
    PromptSpec,
    TextPart,
    VideoFrame,
    VideoPart,
    VideoSource,
)
from decoder_svc.prompt.sampling_check import SamplingLimits
from decoder_svc.prompt.text_tokenizer import TextPiece, TextTokenizer
from decoder_svc.prompt.video_frames import VideoSplitter
from decoder_svc.rows.encoder_client import EncoderClient
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.service import LoadedText
from lookonce.content_key import DEFAULT_TENANT, ContentKey, ProcessorOptions, Tenant
from lookonce.errors import ContextTooLongError, ImageUndecodableError
from lookonce.media.image_header import ImageHeader, ImageLimits, probe_image
from lookonce.model.generation_defaults import GenerationDefaults
from lookonce.turns.fair_queue import CallerId
from lookonce.turns.turn_threads import TurnThreads
from tests import image_files, tiny_models
from tests.decoder_svc.conftest import loaded
from tests.decoder_svc.constraint.demo_constraints import demo_vocabulary
from tests.decoder_svc.prompt.prompts import FINGERPRINT, chat, inline

TIMEOUT_S = 30
NUM_CALLS, NUM_IMAGES, NUM_FRAMES = 40, 16, 128
LIMITS = ImageLimits(max_bytes=200_000, max_pixels=1_000_000, max_aspect=50)
PICTURES = [image_files.encoded(image_files.noise(seed)) for seed in range(6)]
COSTLY, CHEAP = PICTURES[0], PICTURES[1]
# Length of a costly text that shares its threads with ordinary ones.
MEDIUM_CHARS = preparation_threads.LONG_TEXT_CHARS // 2
LONG_CHARS = 2 * preparation_threads.LONG_TEXT_CHARS
A, B = Tenant("a", b"secret"), Tenant("b", b"secret")
SMALL = chat("what is it?", inline(CHEAP))


async def settled(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.002)


class Gate:
    """Stops every costly piece of work where it begins until the gate opens, and notes which pieces began."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        # Costly pieces that may go on while the gate is closed.
        self.permits = threading.Semaphore(0)
        # The name of the tenant of each piece.
        self.begun: list[str] = []

    def enter(self, *, is_costly: bool) -> None:
        self.begun.append("a" if is_costly else "b")
        until_s = time.monotonic() + TIMEOUT_S
        while is_costly and not (self.permits.acquire(blocking=False) or self.opened.wait(0.002)):
            assert time.monotonic() < until_s


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def watch_headers(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends all reading of headers through the gate."""

    def gated(data: bytes, limits: ImageLimits) -> ImageHeader:
        gate.enter(is_costly=data == COSTLY)
        return probe_image(data, limits)

    monkeypatch.setattr(image_resolver, "probe_file", gated)
    monkeypatch.setattr(video_frames, "probe_image", gated)


def watch_texts(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends all tokenizing through the gate."""
    encode = TextTokenizer.encode_pieces

    def gated(self: TextTokenizer, pieces: list[TextPiece]) -> list[int]:
        gate.enter(is_costly=sum(len(piece.text) for piece in pieces) >= MEDIUM_CHARS)
        return encode(self, pieces)

    monkeypatch.setattr(TextTokenizer, "encode_pieces", gated)


class Encoder:
    """A stand-in for the client of an encoder that has no image."""

    async def info(self) -> Any:
        return types.SimpleNamespace(fingerprint=FINGERPRINT)

    async def lookup(self, keys: Sequence[ContentKey], options: ProcessorOptions) -> list[None]:
        return [None] * len(keys)


@pytest.fixture(scope="module")
def qwen_text(tmp_path_factory: pytest.TempPathFactory) -> LoadedText:
    """A model that takes videos."""
    folder = tmp_path_factory.mktemp("video") / "qwen2_vl"
    tiny_models.BUILDERS["qwen2_vl"](folder)
    settings = {
        "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "temporal_patch_size": 2,
    }
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return loaded(folder)


@pytest.fixture
async def threads() -> AsyncIterator[PreparationThreads]:
    threads = PreparationThreads()
    yield threads
    threads.close()


@pytest.fixture
def preparer(qwen_text: LoadedText, threads: PreparationThreads) -> RequestPreparer:
    limits = PromptLimits(8192, NUM_IMAGES, qwen_text.vocab_size, NUM_FRAMES)
    return RequestPreparer(
        PromptBuilder(qwen_text.tokenizer, qwen_text.template, qwen_text.family, limits),
        ChatTools(qwen_text.tokenizer, qwen_text.template),
        VideoSplitter(qwen_text.family, LIMITS),
        ImageResolver(cast(EncoderClient, Encoder()), None, LIMITS, threads),
        GenerationDefaults(),
        SamplingLimits(vocab_size=256, max_stop_strings=4, max_logprobs=5, default_max_tokens=30),
        8192,
        threads,
        ConstraintChecker(demo_vocabulary),
    )


def video(*files: bytes) -> ChatPrompt:
    """Returns a conversation about one video."""
    source = VideoSource(tuple(VideoFrame(data) for data in files), 2.0)
    return ChatPrompt((ChatMessage(ChatRole.USER, (VideoPart(source), TextPart("what is it?"))),))


def num_waiting(threads: TurnThreads) -> int:
    return len(threads._grants._waiting)


def everything(threads: PreparationThreads) -> list[TurnThreads]:
    return [threads._files, threads._lookups, threads._texts, threads._long_texts]


@pytest.mark.parametrize(
    ("costly", "num_pieces"),
    [
        (chat("what", *[inline(COSTLY)] * NUM_IMAGES), NUM_CALLS * NUM_IMAGES),
        # A call reads the frames of its video one after the other.
        (video(*[COSTLY] * NUM_FRAMES), NUM_CALLS),
    ],
    ids=["pictures", "videos"],
)
async def test_a_small_prompt_s_picture_is_read_before_another_tenant_s_backlog(
    preparer: RequestPreparer,
    threads: PreparationThreads,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    costly: PromptSpec,
    num_pieces: int,
) -> None:
    watch_headers(gate, monkeypatch)
    num_threads = preparation_threads._NUM_FILE_THREADS
    backlog = [asyncio.create_task(preparer.build_prompt(costly, A, str(number))) for number in range(NUM_CALLS)]
    await settled(lambda: len(gate.begun) == num_threads)
    await settled(lambda: num_waiting(threads._files) == num_pieces - num_threads)
    small = asyncio.create_task(preparer.build_prompt(SMALL, B, "one"))
    await settled(lambda: num_waiting(threads._files) == num_pieces - num_threads + 1)
    gate.permits.release(num_threads)
    await settled(lambda: len(gate.begun) >= 2 * num_threads)
    assert "b" in gate.begun
    # Its text waits for nobody either: the pictures of the backlog are not read yet.
    async with asyncio.timeout(TIMEOUT_S):
        await small
    for call in backlog:
        call.cancel()
    await asyncio.gather(*backlog, return_exceptions=True)


async def test_a_small_prompt_is_tokenized_before_another_tenant_s_backlog(
    preparer: RequestPreparer, threads: PreparationThreads, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_texts(gate, monkeypatch)
    num_threads = preparation_threads._NUM_TEXT_THREADS
    costly = chat("a" * MEDIUM_CHARS)
    backlog = [asyncio.create_task(preparer.build_prompt(costly, A, str(number))) for number in range(NUM_CALLS)]
    await settled(lambda: len(gate.begun) == num_threads)
    small = asyncio.create_task(preparer.build_prompt(SMALL, B, "one"))
    await settled(lambda: num_waiting(threads._texts) == NUM_CALLS - num_threads + 1)
    gate.permits.release(num_threads)
    await settled(lambda: len(gate.begun) >= 2 * num_threads)
    assert "b" in gate.begun
    gate.opened.set()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(small, *backlog)


async def test_long_texts_keep_no_thread_from_a_small_prompt(
    preparer: RequestPreparer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_texts(gate, monkeypatch)
    costly = chat("a" * LONG_CHARS)
    backlog = [asyncio.create_task(preparer.build_prompt(costly, A, str(number))) for number in range(NUM_CALLS)]
    await settled(lambda: bool(gate.begun))
    async with asyncio.timeout(TIMEOUT_S):
        await preparer.build_prompt(SMALL, B, "one")
    assert gate.begun == ["a"] * preparation_threads._NUM_LONG_TEXT_THREADS + ["b"]
    gate.opened.set()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*backlog)


async def test_look_ups_count_by_their_digests(threads: PreparationThreads) -> None:
    opened, begun = threading.Event(), []

    def look_up(name: str) -> None:
        begun.append(name)
        assert opened.wait(TIMEOUT_S)

    first = [
        asyncio.create_task(threads.look_up(CallerId("first", str(number)), 1, look_up, "first"))
        for number in range(preparation_threads._NUM_LOOKUP_THREADS)
    ]
    await settled(lambda: len(begun) == len(first))
    many = [asyncio.create_task(threads.look_up(CallerId("a", str(n)), 16, look_up, "a")) for n in range(4)]
    few = [asyncio.create_task(threads.look_up(CallerId("b", str(n)), 1, look_up, "b")) for n in range(48)]
    await settled(lambda: num_waiting(threads._lookups) == len(many) + len(few))
    opened.set()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*first, *many, *few)
    third = [index for index, name in enumerate(begun) if name == "a"][2]
    # The other threads may have noted a piece or two first.
    assert 12 <= begun[:third].count("b") <= 48


async def test_calls_of_one_tenant_take_turns(
    preparer: RequestPreparer, threads: PreparationThreads, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_headers(gate, monkeypatch)
    num_threads = preparation_threads._NUM_FILE_THREADS
    costly = chat("what", *[inline(COSTLY)] * NUM_IMAGES)
    first = asyncio.create_task(preparer.build_prompt(costly, A, "costly"))
    await settled(lambda: len(gate.begun) == num_threads)
    small = asyncio.create_task(preparer.build_prompt(SMALL, A, "small"))
    await settled(lambda: num_waiting(threads._files) == NUM_IMAGES - num_threads + 1)
    gate.permits.release(num_threads)
    await settled(lambda: len(gate.begun) >= 2 * num_threads)
    assert "b" in gate.begun
    gate.opened.set()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(first, small)


async def test_a_cancelled_call_leaves_the_queue_at_once_and_frees_its_threads_when_its_pieces_end(
    preparer: RequestPreparer, threads: PreparationThreads, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_headers(gate, monkeypatch)
    num_threads = preparation_threads._NUM_FILE_THREADS
    costly = chat("what", *[inline(COSTLY)] * NUM_IMAGES)
    call = asyncio.create_task(preparer.build_prompt(costly, A, "one"))
    await settled(lambda: len(gate.begun) == num_threads)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (num_waiting(threads._files), threads._files._num_free) == (0, 0)
    gate.opened.set()
    await settled(lambda: threads._files._num_free == num_threads)
    assert len(gate.begun) == num_threads


def random_prompt(rng: random.Random) -> PromptSpec:
    """Returns a prompt of some kind, at times one that is refused."""
    kind = rng.choice(["pictures", "video", "text", "long text", "bad picture", "bad frame"])
    if kind in ("pictures", "bad picture"):
        files = [rng.choice(PICTURES) for _ in range(rng.randint(1, 4))]
        if kind == "bad picture":
            files[rng.randrange(len(files))] = b"no image"
        return ChatPrompt((ChatMessage(ChatRole.USER, (*(ImagePart(inline(file)) for file in files), TextPart("?"))),))
    if kind in ("video", "bad frame"):
        frames = [rng.choice(PICTURES) for _ in range(rng.randint(2, 7))]
        return video(*frames, *([b"no image"] if kind == "bad frame" else []))
    return chat(rng.choice("ab") * (LONG_CHARS if kind == "long text" else rng.randint(1, 300)))


@pytest.mark.parametrize("seed", range(5))
async def test_whoever_leaves_the_others_get_their_own_prompts_and_nothing_stays_behind(
    preparer: RequestPreparer, threads: PreparationThreads, seed: int
) -> None:
    rng = random.Random(seed)
    specs = [random_prompt(rng) for _ in range(80)]

    async def outcome(spec: PromptSpec, tenant: Tenant, request_id: str) -> Prompt | type[Exception]:
        try:
            return await preparer.build_prompt(spec, tenant, request_id)
        except (ImageUndecodableError, ContextTooLongError) as error:
            return type(error)

    # Keys differ between tenants, so the expected prompts have the tenants of the calls.
    tenants = [rng.choice([A, B, DEFAULT_TENANT]) for _ in specs]
    async with asyncio.timeout(TIMEOUT_S):
        expected = [await outcome(spec, tenant, "alone") for spec, tenant in zip(specs, tenants, strict=True)]
        tasks: list[asyncio.Task[Prompt | type[Exception]]] = []
        for number, (spec, tenant) in enumerate(zip(specs, tenants, strict=True)):
            tasks.append(asyncio.create_task(outcome(spec, tenant, f"{number % 9}")))
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
        for index in range(0, len(tasks), 2):
            await asyncio.wait([tasks[index]])
            rng.choice(tasks).cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
    left = [isinstance(result, asyncio.CancelledError) for result in found]
    assert {True, False} == set(left)
    assert [result for result, has_left in zip(found, left, strict=True) if not has_left] == [
        prompt for prompt, has_left in zip(expected, left, strict=True) if not has_left
    ]
    num_threads = [threads._max_workers for threads in (part._threads for part in everything(threads))]
    await settled(lambda: [part._num_free for part in everything(threads)] == num_threads)
    assert [num_waiting(part) for part in everything(threads)] == [0] * len(num_threads)
