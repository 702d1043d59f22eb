"""Numbered cases with concrete numbers: what the prefix cache finds, what the row cache asks for, what a step computes.

Blocks of 4 tokens unless said otherwise. Cases of vLLM texts name theirs: #7883 (admission counts what is really
needed), #11187 (image and offset in block hashes), #11895 (encoder budgets).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from decoder_svc.scheduling.encoder_budget import encoder_budget
from decoder_svc.scheduling.encoder_cache_manager import EncoderCacheManager
from decoder_svc.scheduling.kv_cache.kv_cache_manager import KVCacheManager
from decoder_svc.scheduling.prompt import ImageItem
from decoder_svc.scheduling.request import DEFAULT_SCOPE, CacheScope, Request
from decoder_svc.scheduling.scheduler_output import RowFetch
from lookonce.families.base import Mask
from tests.decoder_svc.scheduling.simulation import chunks, finish_step, image, key, request, rows, scheduler, step
from tests.decoder_svc.scheduling.traffic import masked, steps_until_served

Images = tuple[ImageItem, ...]


@dataclass(frozen=True)
class Ask:
    """One request: its length, what text it has, its images, with whom it shares."""

    num_tokens: int
    text: str = "same"
    images: Images = ()
    scope: CacheScope = DEFAULT_SCOPE
    mask: Mask = Mask.CAUSAL

    def request(self, name: str) -> Request:
        one = request(name, self.num_tokens, self.images, text=self.text, cache_scope=self.scope)
        return masked(one, self.mask)


@dataclass(frozen=True)
class Prefix:
    """After `earlier` were computed, `late` finds `cached` tokens and takes `new_blocks` blocks of its own."""

    number: int
    what: str
    late: Ask
    cached: int
    new_blocks: int
    earlier: tuple[Ask, ...] = ()


IMAGE, PROMPT = Mask.IMAGE, Mask.PROMPT
A, B = CacheScope(salt=b"a"), CacheScope(salt=b"b")
LORA = CacheScope(adapter="lora")
# T0 T1 P00 P01 | P02 P03 P04 T2 | T3 P10 P11 P12
THREE_BLOCKS = (image("aaa", 2, 5), image("bbb", 9, 3))

PREFIX = [
    Prefix(1, "an empty cache has nothing", Ask(16), 0, 4),
    Prefix(2, "a whole prompt of full blocks: one token is left", Ask(16), 15, 0, (Ask(16),)),
    Prefix(3, "one token more than full blocks", Ask(17), 16, 1, (Ask(17),)),
    Prefix(4, "one token less: the last block is not full", Ask(15), 12, 1, (Ask(15),)),
    Prefix(5, "less than a block is never cached", Ask(3), 0, 1, (Ask(3),)),
    Prefix(6, "exactly one block", Ask(4), 3, 0, (Ask(4),)),
    Prefix(7, "one block and one token", Ask(5), 4, 1, (Ask(5),)),
    Prefix(8, "12 of 16 blocks cached: 4 needed (#7883)", Ask(64), 48, 4, (Ask(48),)),
    Prefix(9, "a longer one came before", Ask(48), 47, 0, (Ask(64),)),
    Prefix(10, "longer by one block", Ask(12), 8, 1, (Ask(8),)),
    Prefix(11, "other text", Ask(16, "other"), 0, 4, (Ask(16),)),
    Prefix(12, "the second of two earlier ones", Ask(9), 8, 1, (Ask(8, "other"), Ask(8))),
    Prefix(13, "the same twice before", Ask(9), 8, 1, (Ask(8), Ask(8))),
    Prefix(14, "another salt", Ask(16, scope=B), 0, 4, (Ask(16, scope=A),)),
    Prefix(15, "the same salt", Ask(16, scope=A), 15, 0, (Ask(16, scope=A),)),
    Prefix(16, "a salt where there was none", Ask(16, scope=A), 0, 4, (Ask(16),)),
    Prefix(17, "no salt where there was one", Ask(16), 0, 4, (Ask(16, scope=A),)),
    Prefix(18, "another adapter", Ask(16), 0, 4, (Ask(16, scope=LORA),)),
    Prefix(19, "the same adapter", Ask(16, scope=LORA), 15, 0, (Ask(16, scope=LORA),)),
    Prefix(20, "a request that does not look", Ask(16, scope=CacheScope(bypass=True)), 0, 4, (Ask(16),)),
    Prefix(21, "what did not look is not found either", Ask(16), 0, 4, (Ask(16, scope=CacheScope(bypass=True)),)),
    Prefix(22, "the same image", Ask(12, images=(image("x", 2, 8),)), 11, 0, (Ask(12, images=(image("x", 2, 8),)),)),
    Prefix(23, "another image from block 0 on", Ask(12, images=(image("y", 2, 8),)), 0, 3,
           (Ask(12, images=(image("x", 2, 8),)),)),
    Prefix(24, "another image from block 1 on", Ask(12, images=(image("y", 6, 4),)), 4, 2,
           (Ask(12, images=(image("x", 6, 4),)),)),
    Prefix(25, "the same image one token later", Ask(13, images=(image("x", 6, 4),)), 4, 3,
           (Ask(13, images=(image("x", 5, 4),)),)),
    Prefix(26, "#11187: the same", Ask(12, images=THREE_BLOCKS), 11, 0, (Ask(12, images=THREE_BLOCKS),)),
    Prefix(27, "#11187: another second image", Ask(12, images=(THREE_BLOCKS[0], image("ccc", 9, 3))), 8, 1,
           (Ask(12, images=THREE_BLOCKS),)),
    Prefix(28, "#11187: another first image", Ask(12, images=(image("ccc", 2, 5), THREE_BLOCKS[1])), 0, 3,
           (Ask(12, images=THREE_BLOCKS),)),
    Prefix(29, "rows 4-7 are not rows 0-3: one image against the same twice",
           Ask(8, images=(image("x", 0, 4), image("x", 4, 4))), 4, 1, (Ask(8, images=(image("x", 0, 8),)),)),
    Prefix(30, "adjacent equal images, again", Ask(8, images=(image("x", 0, 4), image("x", 4, 4))), 7, 0,
           (Ask(8, images=(image("x", 0, 4), image("x", 4, 4))),)),
    Prefix(31, "two images in one block, swapped", Ask(4, images=(image("y", 0, 2), image("x", 2, 2))), 0, 1,
           (Ask(4, images=(image("x", 0, 2), image("y", 2, 2))),)),
    Prefix(32, "an image that fills its blocks, other text behind", Ask(12, "other", (image("x", 0, 8),)), 8, 1,
           (Ask(12, images=(image("x", 0, 8),)),)),
    Prefix(33, "a hit that ends inside the image", Ask(16, images=(image("x", 2, 14),)), 8, 2,
           (Ask(10, images=(image("x", 2, 8),)),)),
]  # fmt: skip


WITH_X, WITH_Y = (image("x", 4, 8),), (image("y", 4, 8),)
MASKED_PREFIX = [
    Prefix(62, "tokens of an image see each other: the same image", Ask(13, images=WITH_X, mask=IMAGE), 12, 1,
           (Ask(13, images=WITH_X, mask=IMAGE),)),
    Prefix(63, "the same image, other text behind", Ask(16, "other", images=(image("x", 0, 8),), mask=IMAGE), 8, 2,
           (Ask(12, images=(image("x", 0, 8),), mask=IMAGE),)),
    Prefix(64, "text before another image is the same", Ask(13, images=WITH_Y, mask=IMAGE), 4, 3,
           (Ask(13, images=WITH_X, mask=IMAGE),)),
    Prefix(65, "a hit that ends inside the image", Ask(20, images=(image("x", 2, 12),), mask=IMAGE), 12, 2,
           (Ask(14, images=(image("x", 2, 12),), mask=IMAGE),)),
    Prefix(66, "whole prompts see themselves: the same", Ask(13, images=WITH_X, mask=PROMPT), 12, 1,
           (Ask(13, images=WITH_X, mask=PROMPT),)),
    Prefix(67, "the same, to the last block", Ask(16, mask=PROMPT), 15, 0, (Ask(16, mask=PROMPT),)),
    Prefix(68, "one token more", Ask(17, mask=PROMPT), 0, 5, (Ask(16, mask=PROMPT),)),
    Prefix(69, "one token less", Ask(15, mask=PROMPT), 0, 4, (Ask(16, mask=PROMPT),)),
    Prefix(70, "another image in the last block", Ask(12, images=(image("y", 10, 2),), mask=PROMPT), 0, 3,
           (Ask(12, images=(image("x", 10, 2),), mask=PROMPT),)),
    Prefix(71, "an image where text was, in the last block", Ask(12, images=(image("y", 10, 2),), mask=PROMPT), 0,
           3, (Ask(12, mask=PROMPT),)),
]  # fmt: skip


@pytest.mark.parametrize("case", [*PREFIX, *MASKED_PREFIX], ids=lambda case: f"{case.number:02}")
def test_prefix_cache(case: Prefix) -> None:
    manager = KVCacheManager(num_blocks=64, block_size=4)
    for index, ask in enumerate(case.earlier):
        computed = ask.request(f"earlier {index}")
        manager.admit(computed, manager.find_prefix(computed))
        manager.allocate(computed, computed.num_tokens)
        manager.publish(computed, computed.num_tokens)
    late = case.late.request("late")
    hit = manager.find_prefix(late)
    assert (hit.num_tokens, manager.num_blocks_for_admission(late, hit)) == (case.cached, case.new_blocks), case.what


@dataclass(frozen=True)
class Budget:
    """Budget of a model whose largest image has `image_rows`, with `batched` tokens in a step."""

    number: int
    what: str
    batched: int
    image_rows: int
    compute: int
    cache: int
    num_images: int
    seqs: int = 64
    images_per_prompt: int = 16
    configured: int | None = None


BUDGETS = [
    Budget(34, "small images: the batch decides", 2048, 576, 2048, 2064, 4),
    Budget(35, "#11895: an image larger than the batch", 8192, 8687, 8687, 8703, 1),
    Budget(36, "an image as large as the batch", 2048, 2048, 2048, 2064, 1),
    Budget(37, "two large images and a bit", 2048, 1000, 2048, 2064, 3),
    Budget(38, "one request with one image", 8192, 576, 8192, 8208, 1, seqs=1, images_per_prompt=1),
    Budget(39, "a configured cache", 2048, 576, 2048, 5016, 4, configured=5000),
    Budget(40, "a configured cache below the largest image", 2048, 576, 2048, 592, 2, configured=100),
    Budget(41, "no images at all", 2048, 576, 0, 0, 0, images_per_prompt=0),
]


@pytest.mark.parametrize("case", BUDGETS, ids=lambda case: f"{case.number:02}")
def test_encoder_budget(case: Budget) -> None:
    budget = encoder_budget(
        max_num_batched_tokens=case.batched,
        max_rows_per_image=case.image_rows,
        max_num_seqs=case.seqs,
        max_images_per_prompt=case.images_per_prompt,
        block_size=16,
        configured_cache_rows=case.configured,
    )
    found = (budget.compute_rows, budget.cache_rows, budget.num_profiled_images)
    assert found == (case.compute, case.cache, case.num_images), case.what


@dataclass(frozen=True)
class Rows:
    """An image with some rows resident and some in flight, the rows to ask for, and where computing stops."""

    number: int
    what: str
    resident: tuple[tuple[int, int], ...]
    arriving: tuple[tuple[int, int], ...]
    wanted: tuple[int, int]
    asked: tuple[tuple[int, int], ...]
    first_missing: int | None


ROWS = [
    Rows(42, "nothing there", (), (), (0, 8), ((0, 8),), 0),
    Rows(43, "all there", ((0, 8),), (), (2, 6), (), None),
    Rows(44, "all on their way", (), ((0, 8),), (0, 8), (), 0),
    Rows(45, "the end is missing", ((0, 4),), (), (0, 8), ((4, 8),), 4),
    Rows(46, "a gap", ((0, 2), (6, 8)), (), (0, 8), ((2, 6),), 2),
    Rows(47, "a gap that is partly on its way", ((0, 2),), ((2, 4),), (1, 6), ((4, 6),), 2),
    Rows(48, "behind what is there", ((0, 4),), (), (6, 8), ((6, 8),), 6),
]


@pytest.mark.parametrize("case", ROWS, ids=lambda case: f"{case.number:02}")
def test_row_ranges(case: Rows) -> None:
    cache = EncoderCacheManager(100)
    for each in case.resident:
        cache.reserve(key("x"), rows(*each))
        cache.arrived(key("x"), rows(*each))
    for each in case.arriving:
        cache.reserve(key("x"), rows(*each))
    assert cache.unasked(key("x"), rows(*case.wanted)) == [rows(*each) for each in case.asked], case.what
    assert cache.first_missing_row(key("x"), rows(*case.wanted)) == case.first_missing, case.what


@dataclass(frozen=True)
class Steps:
    """Requests that come together, and (request, start, tokens) of the steps; rows arrive right after their step."""

    number: int
    what: str
    asks: dict[str, Ask]
    expected: list[list[tuple[str, int, int]]]
    budget: int = 16
    blocks: int = 64
    seqs: int = 8
    cache_rows: int = 64
    max_tokens: int = 1
    # Rows asked for in each step.
    fetched: list[int] = field(default_factory=list)


X, Y = image("x", 4, 8), image("y", 4, 8)
STEPS = [
    Steps(49, "one prompt that fits", {"a": Ask(10)}, [[("a", 0, 10)]]),
    Steps(50, "a prompt in chunks", {"a": Ask(40)}, [[("a", 0, 16)], [("a", 16, 16)], [("a", 32, 8)]]),
    Steps(51, "two prompts share the budget", {"a": Ask(12), "b": Ask(12, "b")},
          [[("a", 0, 12), ("b", 0, 4)], [("b", 4, 8)]]),
    Steps(52, "decoding goes before new prompts", {"a": Ask(16), "b": Ask(16, "b")},
          [[("a", 0, 16)], [("a", 16, 1), ("b", 0, 15)], [("a", 17, 1), ("b", 15, 1)], [("b", 16, 1)], [("b", 17, 1)]],
          max_tokens=3),
    Steps(53, "only uncached tokens cost budget (#7883)", {"a": Ask(12), "b": Ask(14)},
          [[("a", 0, 12), ("b", 12, 2)]]),
    Steps(54, "three equal prompts, one is computed", {"a": Ask(16), "b": Ask(16), "c": Ask(16)},
          [[("a", 0, 16)], [("b", 15, 1), ("c", 15, 1)]]),
    Steps(55, "text before an image goes while its rows travel", {"a": Ask(16, images=(X,))},
          [[("a", 0, 4)], [("a", 4, 12)]], fetched=[8, 0]),
    Steps(56, "one fetch for two requests", {"a": Ask(14, "a", (X,)), "b": Ask(14, "b", (X,))},
          [[("a", 0, 4), ("b", 0, 4)], [("a", 4, 10), ("b", 4, 6)], [("b", 10, 4)]], fetched=[8, 0, 0]),
    Steps(57, "equal prompts with an image: one prefill", {"a": Ask(16, images=(X,)), "b": Ask(16, images=(X,))},
          [[("a", 0, 4)], [("a", 4, 12), ("b", 15, 1)]], fetched=[8, 0]),
    Steps(58, "a cache for one image: the second is fetched when the first is done",
          {"a": Ask(13, "a", (X,)), "b": Ask(13, "b", (Y,))},
          [[("a", 0, 4), ("b", 0, 4)], [("a", 4, 9)], [], [("b", 4, 9)]], cache_rows=8, fetched=[8, 0, 8, 0]),
    Steps(59, "no room in the batch: the queue waits", {"a": Ask(4), "b": Ask(4, "b")},
          [[("a", 0, 4)], [("b", 0, 4)]], seqs=1),
    Steps(60, "no blocks for the second until the first has ended", {"a": Ask(12), "b": Ask(12, "b")},
          [[("a", 0, 12)], [("b", 0, 12)]], budget=32, blocks=4),
    Steps(61, "the blocks of a hit are not paid again", {"a": Ask(12), "b": Ask(16)},
          [[("a", 0, 12), ("b", 12, 4)]], budget=32, blocks=4),
]  # fmt: skip


MASKED_STEPS = [
    Steps(72, "an image is computed in one step, when all its rows are there", {"a": Ask(16, images=(X,), mask=IMAGE)},
          [[("a", 0, 4)], [("a", 4, 12)]], fetched=[8, 0]),
    Steps(73, "text up to the image that does not fit any more",
          {"a": Ask(24, images=(image("x", 0, 8), image("y", 12, 8)), mask=IMAGE)},
          [[], [("a", 0, 12)], [("a", 12, 12)]], fetched=[16, 0, 0]),
    Steps(74, "a hit that ends inside an image: the rest of it in one step",
          {"a": Ask(14, images=(image("x", 2, 12),), mask=IMAGE),
           "b": Ask(16, images=(image("x", 2, 12),), mask=IMAGE)},
          [[("a", 0, 2), ("b", 0, 2)], [("a", 2, 12), ("b", 12, 4)]], fetched=[12, 0]),
    Steps(75, "an image whose rows are on their way holds nobody up",
          {"a": Ask(12, mask=IMAGE), "b": Ask(10, "b", (image("x", 0, 8),), mask=IMAGE), "c": Ask(9, "c", mask=IMAGE)},
          [[("a", 0, 12), ("c", 0, 4)], [("c", 4, 5), ("b", 0, 10)]], fetched=[8, 0]),
    Steps(76, "what is left of the budget is too little for an image that could be computed: nobody overtakes it",
          {"w": Ask(9, "w", (image("x", 1, 8),), mask=IMAGE), "a": Ask(20, mask=IMAGE),
           "b": Ask(10, "b", (image("x", 0, 8),), mask=IMAGE), "c": Ask(9, "c", mask=IMAGE)},
          [[("w", 0, 1), ("a", 0, 15)], [("w", 1, 8), ("a", 15, 5)], [("b", 0, 10), ("c", 0, 6)], [("c", 6, 3)]],
          fetched=[8, 0, 0, 0]),
    Steps(77, "a prompt that sees itself is one step, after the rows of all its images",
          {"a": Ask(16, images=(image("x", 2, 4), image("y", 8, 4)), mask=PROMPT)},
          [[], [("a", 0, 16)]], fetched=[8, 0]),
    Steps(78, "such prompts do not share a step that is too small for both, and nobody overtakes",
          {"a": Ask(10, mask=PROMPT), "b": Ask(10, "b", mask=PROMPT), "c": Ask(4, "c", mask=PROMPT)},
          [[("a", 0, 10)], [("b", 0, 10), ("c", 0, 4)]]),
    Steps(79, "equal prompts that see themselves: one prefill", {"a": Ask(16, mask=PROMPT), "b": Ask(16, mask=PROMPT)},
          [[("a", 0, 16)], [("b", 15, 1)]]),
    Steps(80, "what is generated is cut from the prompt and from itself", {"a": Ask(6, mask=PROMPT)},
          [[("a", 0, 6)], [("a", 6, 1)], [("a", 7, 1)]], max_tokens=3),
]  # fmt: skip


@pytest.mark.parametrize("case", [*STEPS, *MASKED_STEPS], ids=lambda case: f"{case.number:02}")
def test_steps(case: Steps) -> None:
    target = scheduler(
        token_budget=case.budget, num_blocks=case.blocks, max_num_seqs=case.seqs, cache_rows=case.cache_rows
    )
    for index, (name, ask) in enumerate(case.asks.items()):
        one = request(name, ask.num_tokens, ask.images, text=ask.text, max_tokens=case.max_tokens, arrival_s=index)
        target.add(masked(one, ask.mask))
    outputs = [step(target) for _ in case.expected]
    assert [chunks(output) for output in outputs] == case.expected, case.what
    if case.fetched:
        assert [sum(len(fetch.rows) for fetch in output.fetches) for output in outputs] == case.fetched, case.what
    step(target)
    assert not target.has_requests()


@pytest.mark.parametrize("num_images", [0, 3])
def test_a_request_that_cannot_be_cut_is_not_overtaken_for_ever(num_images: int) -> None:
    """A whole step's budget is never left as long as prompts of five steps keep coming: they must wait behind it."""

    def newcomer(index: int) -> Request:
        images = tuple(image(f"{index} {number}", 10 + 20 * number, 6) for number in range(num_images))
        return masked(request(f"n{index}", 80, images, arrival_s=2 * index), IMAGE)

    for one in (
        masked(request("w", 20, (image("w", 0, 16),), arrival_s=1), IMAGE),
        masked(request("w", 30, (image("w", 10, 16),), arrival_s=1), IMAGE),
        masked(request("w", 16, arrival_s=1), PROMPT),
    ):
        # The one that came before it takes five steps for its prompt, one more for each image, and two for its answer.
        assert steps_until_served(one, newcomer, 200) <= 20


@pytest.mark.parametrize("mask", [Mask.CAUSAL, IMAGE])
@pytest.mark.parametrize("cache_rows", [12, 16, 32])
@pytest.mark.parametrize("steps_to_arrive", [1, 4])
def test_a_request_whose_image_has_no_room_is_served_in_the_end(
    mask: Mask, cache_rows: int, steps_to_arrive: int
) -> None:
    """Prompts that begin with text keep coming; they must not start, and then take the room as running ones."""
    target = scheduler(token_budget=16, num_blocks=200, max_num_seqs=6, cache_rows=cache_rows, rows_asked=cache_rows)
    waiting = masked(request("w", 16, (image("w", 0, 12),), arrival_s=1), mask)
    travelling: list[tuple[RowFetch, ...]] = []
    for index in range(60):
        images = tuple(image(f"{index} {number}", 20 + 20 * number, 8) for number in range(2))
        target.add(masked(request(f"n{index}", 80, images, arrival_s=2 * index), mask))
        if index == 0:
            target.add(waiting)
        output = target.schedule()
        finish_step(target, output)
        if waiting.num_output_tokens:
            return
        travelling.append(output.fetches)
        if len(travelling) >= steps_to_arrive:
            for fetch in travelling.pop(0):
                target.rows_arrived(fetch.key, fetch.rows, fetch.num_image_rows)
    raise AssertionError(f"{waiting} is overtaken for ever")


def test_cases_are_numbered_without_a_gap() -> None:
    numbers = [case.number for cases in (PREFIX, BUDGETS, ROWS, STEPS, MASKED_PREFIX, MASKED_STEPS) for case in cases]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 50
