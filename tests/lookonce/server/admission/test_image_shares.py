"""A tenant gets as much as is free, so something is free for whoever comes."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack

import pytest

from lookonce.errors import InvalidInputError, OverloadedError
from lookonce.server.admission.image_shares import ImageShares


def test_one_tenant_gets_half_of_the_bytes_and_the_next_one_half_of_the_rest() -> None:
    shares = ImageShares(100)
    with shares.taken("a", 1, 50):
        with pytest.raises(OverloadedError, match="try again later") as caught, shares.taken("a", 1, 1):
            pass
        assert caught.value.retry_after_s > 0
        with shares.taken("b", 1, 25):
            with pytest.raises(OverloadedError), shares.taken("b", 1, 1):
                pass
            with shares.taken("c", 1, 12):
                assert shares.num_bytes == 87
    assert shares.num_bytes == 0


def test_images_given_by_digest_count_in_number() -> None:
    shares = ImageShares(100, max_images=100)
    with shares.taken("a", 50, 0):
        with pytest.raises(OverloadedError, match="have 50 images, and this one has 64"), shares.taken("a", 64, 0):
            pass
        with shares.taken("b", 25, 0):
            pass


def test_a_refusal_names_sizes_and_what_can_never_fit_is_not_asked_to_come_back() -> None:
    shares = ImageShares(2 << 20)
    with shares.taken("a", 1, 1 << 20):
        with pytest.raises(OverloadedError) as caught, shares.taken("a", 1, 300_000):
            pass
        assert "in progress have 1.0 MiB, this one needs 0.3 MiB, and 1.0 MiB are free" in caught.value.message
    with pytest.raises(InvalidInputError, match=r"needs 2\.4 MiB, and all calls together may have 2\.0 MiB"):
        shares.taken("a", 1, 2_500_000).__enter__()
    assert shares.num_bytes == 0


@pytest.mark.parametrize("seed", range(20))
def test_any_traffic_keeps_the_bounds_and_a_new_tenant_finds_room(seed: int) -> None:
    rng = random.Random(seed)
    shares = ImageShares(1000, max_images=200)
    held: list[tuple[str, int, int, ExitStack]] = []
    for _ in range(500):
        tenant, num_images, num_bytes = rng.choice("aaaab"), rng.randint(1, 20), rng.choice([0, 1, 30, 300])
        images, sizes = Counter[str](), Counter[str]()
        for owner, number, size, _ in held:
            images[owner] += number
            sizes[owner] += size
        fits = images[tenant] + num_images <= 200 - images.total()
        fits &= num_bytes == 0 or sizes[tenant] + num_bytes <= 1000 - sizes.total()
        with ExitStack() as stack:
            try:
                stack.enter_context(shares.taken(tenant, num_images, num_bytes))
            except OverloadedError:
                assert not fits
            else:
                assert fits
                held.append((tenant, num_images, num_bytes, stack.pop_all()))
        assert shares.num_bytes == sum(size for _, _, size, _ in held)
        with shares.taken("new", 1, 30):
            pass
        while held and rng.random() < 0.4:
            held.pop(rng.randrange(len(held)))[3].close()
    for *_, stack in held:
        stack.close()
    assert shares.num_bytes == 0
    with shares.taken("a", 100, 500):
        pass
