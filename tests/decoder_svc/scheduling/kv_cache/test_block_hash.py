from __future__ import annotations

from dataclasses import replace

import pytest

from decoder_svc.scheduling.kv_cache.block_hash import BlockHasher
from decoder_svc.scheduling.prompt import ImageItem
from decoder_svc.scheduling.request import CacheScope, Request
from lookonce.families.base import Mask
from tests.decoder_svc.scheduling.simulation import image, request
from tests.decoder_svc.scheduling.traffic import masked


def hashes(one: Request, hasher: BlockHasher | None = None) -> list[bytes]:
    (hasher or BlockHasher(4)).extend(one)
    return list(one.block_hashes)


def test_equal_prefixes_have_equal_hashes_up_to_where_they_part() -> None:
    one, other = request("a", 16, text="same"), request("b", 16, text="same")
    other.token_ids[9] += 1
    first, second = hashes(one), hashes(other)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert first[3] != second[3], "a block's hash covers everything before it"
    assert all(len(digest) == 32 for digest in first)


def test_only_full_blocks_have_a_hash_and_generated_tokens_complete_them() -> None:
    one, hasher = request("a", 7, text="same"), BlockHasher(4)
    assert len(hashes(one, hasher)) == 1
    one.token_ids += [one.token_ids[-1] + 1]
    assert hashes(one, hasher) == hashes(request("b", 8, text="same"))
    assert hasher.num_hashed == 2


def test_a_prompt_is_hashed_once_however_often_it_is_asked_for() -> None:
    one, hasher = request("a", 32_768), BlockHasher(16)
    for _ in range(5):
        hashes(one, hasher)
    assert hasher.num_hashed == 2048


def test_the_three_block_example_of_the_proposal() -> None:
    """vLLM PR #11187, blocks of 4: T0 T1 P00 P01 | P02 P03 P04 T2 | T3 P10 P11 P12."""

    def prompt(first: str, second: str) -> Request:
        return request("r", 12, (image(first, 2, 5), image(second, 9, 3)), text="T")

    base = hashes(prompt("aaa", "bbb"))
    assert base == hashes(prompt("aaa", "bbb"))
    other_second = hashes(prompt("aaa", "ccc"))
    assert other_second[:2] == base[:2]
    assert other_second[2] != base[2]
    other_first = hashes(prompt("ccc", "bbb"))
    assert all(one != other for one, other in zip(base, other_first, strict=True))


def test_the_same_image_at_another_offset_is_another_block() -> None:
    """Blocks of nothing but placeholders look alike: only the distance tells rows 0-3 from rows 4-7."""
    whole = request("a", 12, (image("x", 0, 12),))
    late = request("b", 12, (image("x", 0, 12),))
    assert len(set(hashes(whole))) == 3
    assert hashes(whole) == hashes(late)
    one = request("c", 8, (image("x", 0, 8),), text="")
    shifted = request("d", 8, (image("x", 1, 7),), text="")
    shifted.token_ids[0] = one.token_ids[0]
    assert hashes(one)[0] != hashes(shifted)[0]
    assert hashes(one)[1] != hashes(shifted)[1]


def test_adjacent_equal_images_are_not_one_longer_image() -> None:
    two = request("a", 8, (image("x", 0, 4), image("x", 4, 4)))
    one = request("b", 8, (image("x", 0, 8),))
    assert two.token_ids == one.token_ids
    assert hashes(two)[0] == hashes(one)[0], "rows 0-3 of x either way"
    assert hashes(two)[1] != hashes(one)[1]


def test_two_images_in_one_block_enter_in_order() -> None:
    def prompt(*names: str) -> Request:
        items: tuple[ImageItem, ...] = tuple(image(name, 2 * index, 2) for index, name in enumerate(names))
        return request("r", 4, items, text="")

    assert hashes(prompt("x", "y")) != hashes(prompt("y", "x"))
    assert hashes(prompt("x", "x")) != hashes(prompt("x", "y"))


@pytest.mark.parametrize(
    "scope", [CacheScope(salt=b"s"), CacheScope(salt=b"t"), CacheScope(adapter="s"), CacheScope(adapter="t")]
)
def test_salt_and_adapter_keep_requests_apart(scope: CacheScope) -> None:
    plain = hashes(request("a", 12, text="same"))
    scoped = hashes(request("b", 12, text="same", cache_scope=scope))
    assert not set(plain) & set(scoped)
    assert scoped == hashes(request("c", 12, text="same", cache_scope=scope))
    others = [CacheScope(salt=b"s"), CacheScope(salt=b"t"), CacheScope(adapter="s"), CacheScope(adapter="t")]
    for other in others:
        if other != scope:
            assert not set(scoped) & set(hashes(request("d", 12, text="same", cache_scope=other)))


def test_block_size_and_deployment_are_part_of_every_name() -> None:
    base = hashes(request("a", 8, text="same"))
    assert hashes(request("b", 8, text="same"), BlockHasher(4, b"other")) != base
    assert base[0] not in hashes(request("c", 8, text="same"), BlockHasher(2))


def test_an_images_key_suffices_if_its_tokens_see_each_other() -> None:
    """The key decides the image's length, and nothing behind the image is seen."""
    images = (image("x", 2, 5), image("y", 9, 3))
    causal = hashes(request("a", 16, images, text="same"))
    assert hashes(masked(request("b", 16, images, text="same"), Mask.IMAGE)) == causal


def test_no_block_of_a_prompt_that_sees_itself_is_that_of_another() -> None:
    """The first block's keys depend on the last token."""

    def prompt(num_tokens: int, *images: ImageItem, text: str = "same") -> list[bytes]:
        return hashes(masked(request("r", num_tokens, images, text=text), Mask.PROMPT))

    base = prompt(12, image("x", 9, 2))
    assert prompt(12, image("x", 9, 2)) == base
    for other in (
        prompt(13, image("x", 9, 2)),
        prompt(12),
        prompt(12, image("y", 9, 2)),
        prompt(12, image("x", 9, 1), image("x", 10, 1)),
        prompt(12, image("x", 9, 2), text="other"),
        hashes(request("r", 12, (image("x", 9, 2),), text="same")),
    ):
        assert not set(base) & set(other)


def test_answers_to_equal_prompts_that_see_themselves_share_as_far_as_they_are_equal() -> None:
    first, second = (masked(request(name, 6, text="same"), Mask.PROMPT) for name in "ab")
    first.token_ids += [7, 8, 9, 7, 8, 9]
    second.token_ids += [7, 8, 9, 7, 8, 8]
    assert hashes(first)[:2] == hashes(second)[:2]
    assert hashes(first)[2] != hashes(second)[2]


def test_hashes_do_not_depend_on_the_process() -> None:
    """Written down once: another machine, Python or hash seed must get the same, or replicas would not agree."""
    one = request("a", 8, (image("x", 2, 3),), text="same", cache_scope=CacheScope(salt=b"salt", adapter="lora"))
    assert [digest.hex() for digest in hashes(one)] == [
        "accb6095235a6a7cb52b851be31ea57d09f3fea145622aeb0f061ac27353d41a",
        "678c14eada2a110e6bddbd66a99270311874a43a5f82a0904dc71c5cd12f4862",
    ]


def test_the_time_of_a_pair_of_frames_enters_where_it_has_one() -> None:
    """The same frames at another time of their video have other positions."""

    def with_time(time: int | None) -> list[bytes]:
        item = replace(image("x", 2, 5), time=time)
        return hashes(request("a", 8, (item,), text="same"))

    names = [with_time(time) for time in (None, 0, 1, 2)]
    for index in range(2):
        assert len({one[index] for one in names}) == len(names)
