"""The fingerprint model tells: rows that are not those of the picture, in their places, change what is generated."""

from __future__ import annotations

import asyncio
import pathlib
import random
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
import torch

from lookonce.aio import AsyncClient
from lookonce.content_key import DEFAULT_TENANT, ContentKey, EncoderFingerprint, ProcessorOptions, content_key
from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.generation import Generation, Message
from lookonce.images import ImageRef
from lookonce.store.embedding_store import EmbeddingStore
from tests import fingerprint_model
from tests.conftest import SERVICE_FLAGS
from tests.fingerprint_model import COLOURS, NUM_ROWS, Answer, Board, Reference
from tests.in_process_stack import InProcessStack
from tests.lookonce.store.entries import write

NUM_PAIRS = 200
QUESTION = "What is in the picture?"
# Logits. Two computations of the same differ by thousandths at most; a wrong token needs the whole margin.
MIN_MARGIN = 15.0
MAX_NOISE = 0.01

# The rows of one picture, 64 numbers each.
META = EmbeddingMeta(NUM_ROWS, 64, 0, RowDtype.FLOAT32, 80, 80)

Pair: TypeAlias = tuple[Board, Board]
Tamper: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows of the picture, rows of another one) → what a fault makes of the former."""


def other_image(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return other


def shifted_up(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return own.roll(-1, dims=-2)


def shifted_down(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The first row is there twice, the last one is not read."""
    return torch.cat([own[..., :1, :], own[..., :-1, :]], dim=-2)


def torn_end(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    half = NUM_ROWS // 2
    return torch.cat([own[..., :half, :], other[..., half:, :]], dim=-2)


def torn_beginning(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    half = NUM_ROWS // 2
    return torch.cat([other[..., :half, :], own[..., half:, :]], dim=-2)


TAMPERS = (other_image, shifted_up, shifted_down, torn_end, torn_beginning)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return fingerprint_model.build(tmp_path_factory.mktemp("models") / "fingerprint")


@pytest.fixture(scope="module")
def reference(folder: pathlib.Path) -> Reference:
    return Reference(folder)


def pairs(seed: int) -> list[Pair]:
    """Every second pair differs in one channel of one square only, in the first and in the second half in turn."""
    rng = random.Random(seed)
    found: list[Pair] = []
    while len(found) < NUM_PAIRS:
        board, number = fingerprint_model.random_board(rng), len(found)
        other = fingerprint_model.random_board(rng)
        if number % 2:
            other = fingerprint_model.with_one_other_square(board, rng)
            is_in_second_half = board[: NUM_ROWS // 2] == other[: NUM_ROWS // 2]
            if is_in_second_half != bool(number & 2):
                continue
        found.append((board, other))
    return found


def rows_of(reference: Reference, chosen: list[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.rows([own for own, _ in chosen]), reference.rows([other for _, other in chosen])


def answers(reference: Reference, rows: torch.Tensor) -> list[Answer]:
    """To prompts with one picture [num_prompts, NUM_ROWS, hidden] or several [num_prompts, num_pictures, …]."""
    return reference.answer_rows(QUESTION, rows if rows.ndim == 4 else rows[:, None])


def num_changed(before: list[Answer], after: list[Answer]) -> int:
    return sum(one.token_ids != other.token_ids for one, other in zip(before, after, strict=True))


def spelled(board: Board) -> str:
    return "".join(COLOURS[colour] for colour in board)


def test_the_answer_spells_the_picture(reference: Reference) -> None:
    chosen = pairs(1)
    found = answers(reference, rows_of(reference, chosen)[0])
    assert [fingerprint_model.squares_in(answer.text) for answer in found] == [spelled(own) for own, _ in chosen]


def test_the_answer_to_two_pictures_spells_both(reference: Reference) -> None:
    for own, other in pairs(2)[:20]:
        words = reference.answer(QUESTION, [own, other]).text.split()
        assert words == [a + b for a, b in zip(spelled(own), spelled(other), strict=True)]


@pytest.mark.parametrize(("width", "height"), [(40, 40), (55, 35), (640, 480), (3000, 2000)])
def test_the_size_of_a_picture_changes_nothing(reference: Reference, width: int, height: int) -> None:
    boards = [fingerprint_model.random_board(random.Random(seed)) for seed in range(10)]
    found = answers(reference, reference.rows(boards, width, height))
    assert [fingerprint_model.squares_in(answer.text) for answer in found] == [spelled(board) for board in boards]
    assert min(answer.margin for answer in found) > MIN_MARGIN


@pytest.mark.parametrize("tamper", TAMPERS, ids=lambda tamper: tamper.__name__)
def test_every_one_of_200_tampered_pictures_changes_the_answer(reference: Reference, tamper: Tamper) -> None:
    chosen = pairs(4)
    if tamper in (torn_end, torn_beginning):
        # Rows of a half that both pictures share are no wrong rows.
        half = slice(NUM_ROWS // 2, None) if tamper is torn_end else slice(NUM_ROWS // 2)
        chosen = [pair for pair in (*chosen, *pairs(5)) if pair[0][half] != pair[1][half]][:NUM_PAIRS]
    own, other = rows_of(reference, chosen)
    assert num_changed(answers(reference, own), answers(reference, tamper(own, other))) == len(chosen) == NUM_PAIRS


def test_every_one_of_200_swaps_inside_a_prompt_changes_the_answer(reference: Reference) -> None:
    own, other = rows_of(reference, pairs(6))
    before = answers(reference, torch.stack([own, other], dim=1))
    assert num_changed(before, answers(reference, torch.stack([other, own], dim=1))) == NUM_PAIRS


@pytest.mark.parametrize("place", [0, 1], ids=["earlier", "later"])
@pytest.mark.parametrize("tamper", [shifted_up, torn_end], ids=lambda tamper: tamper.__name__)
def test_both_pictures_of_a_prompt_are_read(reference: Reference, tamper: Tamper, place: int) -> None:
    chosen = [pair for pair in pairs(7) if pair[0][NUM_ROWS // 2 :] != pair[1][NUM_ROWS // 2 :]]
    own, other = rows_of(reference, chosen)
    good = torch.stack([own, other], dim=1)
    wrong = good.clone()
    wrong[:, place] = tamper(good[:, place], good[:, 1 - place])
    assert num_changed(answers(reference, good), answers(reference, wrong)) == len(chosen) > 100


def test_a_single_wrong_row_changes_the_one_token_that_reads_it(reference: Reference) -> None:
    own, other = rows_of(reference, pairs(8)[:1])
    wrong = own.repeat(NUM_ROWS, 1, 1)
    differs = (own[0] - other[0]).abs().amax(dim=-1) > 0.5
    places = torch.arange(NUM_ROWS)
    wrong[places, places] = other[0]
    (expected,) = answers(reference, own)
    for place, answer in enumerate(answers(reference, wrong)):
        changed = [a != b for a, b in zip(answer.token_ids, expected.token_ids, strict=True)]
        assert changed == [bool(differs[place]) and number == place for number in range(NUM_ROWS)]


def test_margins_are_beyond_any_noise(reference: Reference) -> None:
    """Noise: what the size of the batch, i.e. the order of sums, does to any logit."""
    own, other = rows_of(reference, pairs(9))
    together = [*answers(reference, own), *answers(reference, torch.stack([own, other], dim=1))]
    assert min(answer.margin for answer in together) > MIN_MARGIN
    alone = [answers(reference, own[number][None])[0] for number in range(40)]
    noise = max(float((one.logits - two.logits).abs().max()) for one, two in zip(alone, together, strict=False))
    assert noise < MAX_NOISE


def key_of(image: ImageRef, fingerprint: EncoderFingerprint) -> ContentKey:
    return content_key(image.digest, fingerprint, ProcessorOptions(), DEFAULT_TENANT)


async def ask(client: AsyncClient, *images: ImageRef | bytes) -> Generation:
    return await client.generate(
        [Message("user", (QUESTION, *images))], max_tokens=NUM_ROWS, temperature=0.0, logprobs=2
    )


def margin_noise(found: Generation, expected: Answer) -> float:
    """Largest difference of a token's lead over the second-best token, between the decoder and the reference."""
    best = expected.logits.topk(2).values
    leads = [first - second for _, (_, first), (_, second) in found.logprobs]
    return float((torch.tensor(leads) - (best[:, 0] - best[:, 1])).abs().max())


@pytest.fixture(scope="module")
def stack(folder: pathlib.Path) -> Iterator[InProcessStack]:
    """The product's own loading; chunks and row ranges end inside pictures."""
    decoder = (*SERVICE_FLAGS, "--max-num-batched-tokens", "32", "--encoder-cache-rows", "60")
    with InProcessStack(folder, encoder_arguments=SERVICE_FLAGS, decoder_arguments=decoder) as stack:
        yield stack


async def test_answers_are_those_of_transformers(stack: InProcessStack, reference: Reference) -> None:
    chosen = pairs(10)[:24]
    prompts = [pair[: 1 + number % 2] for number, pair in enumerate(chosen)]
    expected = [reference.answer(QUESTION, boards) for boards in prompts]
    async with AsyncClient.connect(stack.decoder_targets[0]) as client:
        found = await asyncio.gather(*(ask(client, *map(fingerprint_model.png, boards)) for boards in prompts))
        text = await client.generate("Tell me a story.", max_tokens=100, temperature=0.0)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert text.token_ids == reference.answer("Tell me a story.", max_tokens=100).token_ids
    assert max(map(margin_noise, found, expected)) < MAX_NOISE


@pytest.mark.parametrize("tamper", TAMPERS, ids=lambda tamper: tamper.__name__)
async def test_wrong_rows_in_redis_are_seen(stack: InProcessStack, reference: Reference, tamper: Tamper) -> None:
    """Entries with good seals and wrong rows, as no fault of Redis could make them."""
    chosen = [pair for pair in pairs(11 + TAMPERS.index(tamper)) if pair[0][-1] != pair[1][-1]][:6]
    own, other = rows_of(reference, chosen)
    wrong = tamper(own, other)
    assert stack.redis_url is not None
    store = EmbeddingStore(stack.redis_url, budget_s=5.0, ttl_s=600, max_entry_bytes=1 << 20)
    async with AsyncClient.connect(stack.decoder_targets[0]) as client:
        fingerprint = EncoderFingerprint((await client.model_info()).encoder_fingerprint)
        images = [ImageRef.from_bytes(fingerprint_model.png(board)) for board, _ in chosen]
        for image, rows in zip(images, wrong, strict=True):
            assert write(store, key_of(image, fingerprint), META, memoryview(rows.contiguous().numpy()))
        found = await asyncio.gather(*(ask(client, image) for image in images))
    store.close()
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in answers(reference, wrong)]
    right = answers(reference, own)
    assert sum(one.token_ids == two.token_ids for one, two in zip(found, right, strict=True)) == 0
