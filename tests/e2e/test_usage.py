"""The image tokens that answers call encoded are the rows that the encoders computed, whoever waited for whom."""

from __future__ import annotations

import asyncio
import itertools
import pathlib
import random
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from lookonce.aio import AsyncClient
from lookonce.embedding_meta import RowDtype
from lookonce.generation import Generation
from tests import image_files, tiny_models
from tests.conftest import SERVICE_FLAGS
from tests.in_process_stack import InProcessStack
from tests.known_fingerprints import known_fingerprints

# Rows of every picture here.
NUM_ROWS = 16
# A pool of ten prompts with one picture, so that many requests are preempted, and a row cache of six pictures.
FEW_BLOCKS = ("--num-kv-blocks", "20", "--block-size", "16", "--encoder-cache-rows", "96")
_seeds = itertools.count(9_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.build_llava_clip(tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture(scope="module", params=[(), ("--row-format", "int8")], ids=["native", "int8"])
def stack(folder: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[InProcessStack]:
    """Two encoders and two decoders, which have little room."""
    with (
        known_fingerprints(folder, RowDtype.FLOAT32),
        InProcessStack(
            folder,
            num_encoders=2,
            num_decoders=2,
            dtype="float32",
            encoder_arguments=(*SERVICE_FLAGS, *request.param),
            decoder_arguments=(*SERVICE_FLAGS, *FEW_BLOCKS),
        ) as stack,
    ):
        yield stack


@dataclass(frozen=True, slots=True)
class Workload:
    """A burst of requests, all sent at the same time."""

    # The pictures of each request.
    prompts: tuple[tuple[bytes, ...], ...]
    # Requests whose callers leave, and after how many seconds.
    leaving: dict[int, float]


def workload(seed: int, num_pictures: int, num_requests: int, *, share_leaving: float = 0.0) -> Workload:
    """Requests for one picture or several, some of them twice."""
    rng = random.Random(seed)
    files = [image_files.encoded(image_files.noise(next(_seeds))) for _ in range(num_pictures)]
    prompts: list[tuple[bytes, ...]] = [(files[index % num_pictures],) for index in range(num_requests)]
    for index in rng.sample(range(num_requests), num_requests // 4):
        prompts[index] = tuple(rng.choices(files, k=rng.randint(2, 3)))
    rng.shuffle(prompts)
    leaving = {index: rng.uniform(0, 0.3) for index in range(num_requests) if rng.random() < share_leaving}
    return Workload(tuple(prompts), leaving)


async def answered(stack: InProcessStack, load: Workload) -> list[Generation]:
    """Sends the requests and returns the answers of all callers that stayed."""
    async with AsyncExitStack() as exits:
        clients = [await exits.enter_async_context(AsyncClient.connect(target)) for target in stack.decoder_targets]
        calls = [
            asyncio.create_task(ask(clients[index % len(clients)], images, index))
            for index, images in enumerate(load.prompts)
        ]
        for index, after_s in load.leaving.items():
            asyncio.get_running_loop().call_later(after_s, calls[index].cancel)
        ended = await asyncio.gather(*calls, return_exceptions=True)
    for index, outcome in enumerate(ended):
        if isinstance(outcome, BaseException) and index not in load.leaving:
            raise outcome
    return [one for one in ended if isinstance(one, Generation)]


async def ask(client: AsyncClient, images: Sequence[bytes], number: int) -> Generation:
    text = f"{number} tell me everything" if number % 3 else "tell me everything"
    return await client.generate(text, images=list(images), max_tokens=3 + number % 20)


def num_rows_computed(stack: InProcessStack) -> int:
    return NUM_ROWS * int(stack.metric(stack.encoders, "lookonce_encoder_encodes_total"))


def num_rows_in_metric(stack: InProcessStack) -> int:
    return int(
        sum(
            service.registry.get_sample_value("lookonce_decoder_image_rows_total", {"tier": "encoded"}) or 0
            for service in stack.decoders
        )
    )


def check_every_token_is_counted_once(answers: Sequence[Generation]) -> None:
    for usage in (answer.usage for answer in answers):
        counted = usage.encoded_image_tokens + usage.cached_image_tokens + usage.skipped_image_tokens
        assert counted == usage.image_tokens > 0


@pytest.mark.parametrize("seed", range(2))
async def test_answers_count_each_encode_once(stack: InProcessStack, seed: int) -> None:
    computed, in_metric = num_rows_computed(stack), num_rows_in_metric(stack)
    preemptions = stack.metric(stack.decoders, "lookonce_decoder_preemptions_total")
    load = workload(seed, num_pictures=8, num_requests=80)
    answers = await answered(stack, load)
    check_every_token_is_counted_once(answers)
    num_encoded = sum(answer.usage.encoded_image_tokens for answer in answers)
    assert num_encoded == num_rows_computed(stack) - computed == 8 * NUM_ROWS
    assert num_rows_in_metric(stack) - in_metric == num_encoded
    assert stack.metric(stack.decoders, "lookonce_decoder_preemptions_total") > preemptions


@pytest.mark.parametrize("share_leaving", [0.3, 1.0])
async def test_callers_that_leave_make_no_answer_count_more(stack: InProcessStack, share_leaving: float) -> None:
    """Later answers may count the encodes of callers that left, and none counts more than was computed."""
    computed, in_metric = num_rows_computed(stack), num_rows_in_metric(stack)
    load = workload(7, num_pictures=8, num_requests=60, share_leaving=share_leaving)
    answers = await answered(stack, load)
    again = Workload(tuple((file,) for file in dict.fromkeys(itertools.chain(*load.prompts)) for _ in range(2)), {})
    answers += await answered(stack, again)
    check_every_token_is_counted_once(answers)
    num_encoded = sum(answer.usage.encoded_image_tokens for answer in answers)
    assert num_rows_computed(stack) - computed == 8 * NUM_ROWS
    assert num_encoded <= num_rows_in_metric(stack) - in_metric <= 8 * NUM_ROWS


async def test_images_that_were_encoded_ahead_of_time_are_counted_by_nobody_else(stack: InProcessStack) -> None:
    pictures = [image_files.encoded(image_files.noise(next(_seeds))) for _ in range(4)]
    computed = num_rows_computed(stack)
    async with AsyncExitStack() as exits:
        clients = [await exits.enter_async_context(AsyncClient.connect(target)) for target in stack.decoder_targets]
        results = await asyncio.gather(*(client.encode([*pictures, *pictures]) for client in clients for _ in range(3)))
        answers = await asyncio.gather(*(ask(clients[index % 2], [pictures[index % 4]], index) for index in range(12)))
    encodings = [ref.encoding for refs in results for ref in {ref.hex: ref for ref in refs}.values()]
    assert sum(one is not None and one.source == "computed" for one in encodings) == 4
    assert num_rows_computed(stack) - computed == 4 * NUM_ROWS
    check_every_token_is_counted_once(answers)
    assert sum(answer.usage.encoded_image_tokens for answer in answers) == 0
