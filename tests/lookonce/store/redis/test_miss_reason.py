"""Miss reasons are bounded metric labels, and the exceptions say what may be done after them."""

from __future__ import annotations

import re

import pytest

from lookonce.store.redis.miss_reason import (
    UNREACHABLE_REASONS,
    CacheMissError,
    CorruptEntryError,
    MissReason,
    RedisReplyError,
    RedisTroubleError,
)


def test_every_reason_is_a_distinct_label() -> None:
    assert len({reason.value for reason in MissReason}) == len(MissReason)
    assert all(re.fullmatch("[a-z_]+", reason.value) for reason in MissReason)


@pytest.mark.parametrize("error", [CacheMissError, CorruptEntryError, RedisTroubleError, RedisReplyError])
def test_every_exception_is_a_miss_that_carries_its_reason(error: type[CacheMissError]) -> None:
    miss = error(MissReason.LENGTH)
    assert isinstance(miss, CacheMissError)
    assert (miss.reason, str(miss)) == (MissReason.LENGTH, "length")


def test_a_corrupt_entry_is_no_trouble_with_redis() -> None:
    assert not issubclass(CorruptEntryError, RedisTroubleError)


def test_an_answer_of_the_server_does_not_count_as_unreachable() -> None:
    answers = {MissReason.ABSENT, MissReason.SLOW, MissReason.OOM, MissReason.LOADING, MissReason.CLUSTER_DOWN}
    assert not answers & UNREACHABLE_REASONS
    assert {MissReason.CONNECT_FAILED, MissReason.TIMEOUT, MissReason.CLOSED} <= UNREACHABLE_REASONS
