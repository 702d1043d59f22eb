"""Row demand against a model that looks at one token and one row at a time."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decoder_svc.scheduling.encoder_cache_manager import EncoderCacheManager
from decoder_svc.scheduling.prompt import ImageItem
from decoder_svc.scheduling.request import Request, RequestState
from decoder_svc.scheduling.row_demand import RowDemand
from decoder_svc.scheduling.scheduler_output import RowFetch
from lookonce.content_key import ContentKey
from tests.decoder_svc.scheduling.simulation import image, key, request, rows

CAPACITY = 12
MAX_IMAGE_ROWS = 6
MAX_ASKED = 8


class Model:
    """Rows by image, and for each request the rows of its tokens; no ranges, no budgets."""

    def __init__(self) -> None:
        self.resident: dict[ContentKey, set[int]] = defaultdict(set)
        self.arriving: dict[ContentKey, set[int]] = defaultdict(set)

    @property
    def num_rows(self) -> int:
        return sum(map(len, (*self.resident.values(), *self.arriving.values())))

    def rows_from(self, one: Request, start: int) -> list[tuple[int, ImageItem, int]]:
        """(token, image, row) of every row that tokens from `start` on take."""
        return [
            (item.token_of_row(row), item, row)
            for item in one.prompt.images
            for row in range(item.num_rows)
            if item.token_of_row(row) >= start
        ]

    def runnable_stop(self, one: Request, start: int, *, overlap: bool) -> int:
        needed = self.rows_from(one, start)
        if not overlap and any(row in self.arriving[item.key] for _, item, row in needed):
            return start
        missing = [token for token, item, row in needed if row not in self.resident[item.key]]
        return min(missing, default=one.num_tokens)

    def has_asked_for_all(self, one: Request, start: int) -> bool:
        return all(
            row in self.resident[item.key] | self.arriving[item.key] for _, item, row in self.rows_from(one, start)
        )


class RowDemandMachine(RuleBasedStateMachine):
    """Requests come, are preempted and end; rows are asked for, arrive or fail; tokens are computed."""

    @initialize(overlap=st.booleans())
    def start(self, overlap: bool) -> None:
        self.overlap = overlap
        self.cache = EncoderCacheManager(CAPACITY)
        self.demand = RowDemand(self.cache, MAX_ASKED, overlap_encode=overlap)
        self.model = Model()
        self.live: list[Request] = []
        self.travelling: list[RowFetch] = []
        self.num_made = 0
        # Rows that encoders computed, less those that answers have counted.
        self.num_encoded_rows = 0

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        """A request with up to three images, of which the prefix cache may have the first tokens."""
        images: list[ImageItem] = []
        end = 0
        for name in data.draw(st.lists(st.sampled_from("uvw"), max_size=3)):
            offset = end + data.draw(st.integers(0, 2))
            # One size for each picture.
            images.append(image(name, offset, MAX_IMAGE_ROWS - "uvw".index(name)))
            end = images[-1].span.stop
        self.num_made += 1
        one = request(f"r{self.num_made}", end + 2, tuple(images), arrival_s=self.num_made)
        one.state = RequestState.RUNNING
        self.demand.add(one)
        self.live.append(one)
        num_cached = data.draw(st.integers(0, one.num_tokens - 1))
        self.demand.account_for_hit(one, num_cached)
        self.advance(one, num_cached)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.ask()
        for one in self.live:
            stop = self.demand.runnable_stop(one, one.num_computed_tokens)
            self.advance(one, data.draw(st.integers(one.num_computed_tokens, stop)))

    @precondition(lambda self: self.travelling)
    @rule(data=st.data(), is_encoded=st.booleans())
    def arrive(self, data: st.DataObject, is_encoded: bool) -> None:
        fetch = data.draw(st.sampled_from(self.travelling))
        self.bring(fetch, is_encoded=is_encoded)

    @precondition(lambda self: self.travelling)
    @rule(data=st.data(), had_data=st.booleans())
    def fail(self, data: st.DataObject, had_data: bool) -> None:
        """A fetch fails; the requests that cannot continue are those whose tokens take one of its rows."""
        fetch = data.draw(st.sampled_from(self.travelling))
        self.travelling.remove(fetch)
        lost = set(range(fetch.rows.start, fetch.rows.stop))
        for one in self.live:
            takes = any(
                item.key == fetch.key and row in lost
                for _, item, row in self.model.rows_from(one, one.num_computed_tokens)
            )
            # All images have bytes here: a fetch without them lets every request ask again.
            found = self.demand.takes_any(one, fetch.key, fetch.rows, had_data=had_data)
            assert found == (takes and had_data)
        self.cache.drop(fetch.key, fetch.rows)
        self.model.arriving[fetch.key] -= lost

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.live))
        self.demand.restart(one)
        one.num_computed_tokens = 0

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A request ends: with an answer if all is computed, else because its caller leaves."""
        one = data.draw(st.sampled_from(self.live))
        if one.num_computed_tokens == one.num_tokens:
            one.token_ids.append(7)
            self.num_encoded_rows -= one.usage.encoded_image_tokens
        self.demand.remove(one)
        self.live.remove(one)

    @invariant()
    def accounts_agree(self) -> None:
        self.cache.check_integrity()
        assert self.cache.num_reserved_rows == self.model.num_rows <= CAPACITY
        num_counted = sum(one.usage.encoded_image_tokens for one in self.live)
        assert num_counted + self.demand._uncounted.num_rows == self.num_encoded_rows, "encodes were lost or doubled"
        for one in self.live:
            start = one.num_computed_tokens
            assert self.demand.runnable_stop(one, start) == self.model.runnable_stop(one, start, overlap=self.overlap)
            assert self.demand.has_asked_for_all(one, start) == self.model.has_asked_for_all(one, start)
            if start == one.num_tokens:
                usage = one.usage
                accounted = usage.encoded_image_tokens + usage.cached_image_tokens + usage.skipped_image_tokens
                assert accounted == usage.image_tokens, "rows were counted twice or not at all"

    def teardown(self) -> None:
        """Left alone, every request gets its rows, the first ones first; then nobody needs any."""
        self.finish_all(are_encoded=True)
        for one in self.live:
            self.demand.remove(one)
        assert self.cache.num_uses() == 0
        self.leave_no_count_open()

    def leave_no_count_open(self) -> None:
        """Encodes that no answer has counted are counted by the next requests that take their rows."""
        for name in "uvw" * (1 + self.num_encoded_rows // 4):
            num_rows = MAX_IMAGE_ROWS - "uvw".index(name)
            self.num_made += 1
            one = request(f"r{self.num_made}", num_rows, (image(name, 0, num_rows),), arrival_s=self.num_made)
            one.state = RequestState.RUNNING
            self.demand.add(one)
            self.live = [one]
            self.finish_all(are_encoded=False)
            one.token_ids.append(7)
            self.demand.remove(one)
            self.num_encoded_rows -= one.usage.encoded_image_tokens
        assert self.num_encoded_rows == self.demand._uncounted.num_rows == 0

    def finish_all(self, *, are_encoded: bool) -> None:
        """Runs steps until every request is computed."""
        for _ in range(40):
            self.ask()
            while self.travelling:
                self.bring(self.travelling[0], is_encoded=are_encoded)
            for one in self.live:
                self.advance(one, self.demand.runnable_stop(one, one.num_computed_tokens))
            self.accounts_agree()
        assert all(one.num_computed_tokens == one.num_tokens for one in self.live)

    def ask(self) -> None:
        """Runs a step's requests for rows: only missing rows, each once, within the step's limit."""
        self.demand.begin_step()
        # The first one with tokens to compute may displace the others' rows: else all may wait for each other.
        first = next((one for one in self.live if one.num_computed_tokens < one.num_tokens), None)
        for one in self.live:
            self.demand.ask(one, one.num_computed_tokens, 1, is_first=True, may_displace=one is first)
        for evicted, gone in self.cache.take_evicted():
            self.model.resident[evicted] -= set(range(gone.start, gone.stop))
        for fetch in self.demand.fetches:
            asked = set(range(fetch.rows.start, fetch.rows.stop))
            assert asked.isdisjoint(self.model.resident[fetch.key] | self.model.arriving[fetch.key])
            self.model.arriving[fetch.key] |= asked
        num_rows = sum(len(fetch.rows) for fetch in self.demand.fetches)
        assert num_rows <= MAX_ASKED or len(self.demand.fetches) == 1
        self.travelling += self.demand.fetches

    def bring(self, fetch: RowFetch, *, is_encoded: bool) -> None:
        self.travelling.remove(fetch)
        brought = set(range(fetch.rows.start, fetch.rows.stop))
        num_encoded_rows = fetch.num_image_rows if is_encoded else 0
        self.num_encoded_rows += num_encoded_rows
        assert self.demand.arrived(fetch.key, fetch.rows, num_encoded_rows)
        self.model.arriving[fetch.key] -= brought
        self.model.resident[fetch.key] |= brought

    def advance(self, one: Request, num_tokens: int) -> None:
        one.num_computed_tokens = num_tokens
        self.demand.pass_computed(one)


TestRowDemandMachine = RowDemandMachine.TestCase
TestRowDemandMachine.settings = settings(max_examples=60, stateful_step_count=30)


def ready(one: Request, cache: EncoderCacheManager, demand: RowDemand) -> Request:
    """The request runs and is known to the demand."""
    one.state = RequestState.RUNNING
    demand.add(one)
    return one


@pytest.fixture
def cache() -> EncoderCacheManager:
    return EncoderCacheManager(10)


@pytest.fixture
def demand(cache: EncoderCacheManager) -> RowDemand:
    return RowDemand(cache, max_num_rows_asked=6)


def ask(demand: RowDemand, one: Request, least: int = 1, *, may_displace: bool = True, is_first: bool = True) -> None:
    demand.ask(one, one.num_computed_tokens, least, is_first=is_first, may_displace=may_displace)


def test_a_single_image_over_the_limit_of_a_step_is_still_asked_for(
    cache: EncoderCacheManager, demand: RowDemand
) -> None:
    demand.begin_step()
    ask(demand, ready(request("a", 10, (image("x", 0, 8),)), cache, demand))
    assert [fetch.rows for fetch in demand.fetches] == [rows(0, 8)]
    assert not demand.has_deferred


def test_rows_over_the_limit_of_a_step_are_asked_for_in_the_next(cache: EncoderCacheManager, demand: RowDemand) -> None:
    one = ready(request("a", 12, (image("x", 0, 4), image("y", 4, 4))), cache, demand)
    demand.begin_step()
    ask(demand, one)
    assert [fetch.key for fetch in demand.fetches] == [key("x")]
    assert demand.has_deferred
    demand.begin_step()
    ask(demand, one)
    assert [fetch.key for fetch in demand.fetches] == [key("y")]
    assert not demand.has_deferred


def test_while_the_first_finds_no_room_none_behind_it_takes_any(cache: EncoderCacheManager, demand: RowDemand) -> None:
    cache.reserve(key("other"), rows(0, 8))
    first = ready(request("a", 8, (image("x", 0, 4),), arrival_s=1), cache, demand)
    behind = ready(request("b", 8, (image("y", 0, 2),), arrival_s=2), cache, demand)
    demand.begin_step()
    ask(demand, first)
    ask(demand, behind)
    assert demand.fetches == ()
    assert demand.has_deferred


def test_the_source_of_each_image_is_counted_by_who_paid_for_it(cache: EncoderCacheManager, demand: RowDemand) -> None:
    """The first use of an image pays for its encode; the same image again, and another request, find its rows."""
    one = ready(request("a", 12, (image("x", 0, 4), image("x", 6, 4)), arrival_s=1), cache, demand)
    other = ready(request("b", 12, (image("x", 0, 4),), arrival_s=2), cache, demand)
    demand.begin_step()
    ask(demand, one)
    ask(demand, other)
    assert demand.arrived(key("x"), rows(0, 4), 4)
    for each in (one, other):
        each.num_computed_tokens = each.num_tokens
        demand.pass_computed(each)
    assert (one.usage.encoded_image_tokens, one.usage.cached_image_tokens) == (4, 4)
    assert (other.usage.encoded_image_tokens, other.usage.cached_image_tokens) == (0, 4)


def test_a_recomputation_after_a_preemption_is_not_counted_again(cache: EncoderCacheManager, demand: RowDemand) -> None:
    one = ready(request("a", 8, (image("x", 0, 4),)), cache, demand)
    demand.begin_step()
    ask(demand, one)
    assert cache.arrived(key("x"), rows(0, 4))
    for _ in range(2):
        one.num_computed_tokens = 8
        demand.pass_computed(one)
        assert one.usage.cached_image_tokens == 4
        demand.restart(one)
        one.num_computed_tokens = 0


def take_all(demand: RowDemand, one: Request, num_encoded_rows: int) -> None:
    """The request's missing rows are asked for and arrive, and all its tokens are computed."""
    demand.begin_step()
    ask(demand, one)
    for fetch in demand.fetches:
        assert demand.arrived(fetch.key, fetch.rows, num_encoded_rows)
    one.num_computed_tokens = one.num_tokens
    demand.pass_computed(one)


def test_a_request_that_ends_without_output_leaves_its_count_to_the_next(
    cache: EncoderCacheManager, demand: RowDemand
) -> None:
    gone = ready(request("a", 8, (image("x", 0, 4),)), cache, demand)
    take_all(demand, gone, 4)
    assert gone.usage.encoded_image_tokens == 4
    demand.remove(gone)
    assert (gone.usage.encoded_image_tokens, gone.usage.cached_image_tokens) == (0, 4)
    found = ready(request("b", 8, (image("x", 0, 4),)), cache, demand)
    demand.account_for_hit(found, 8)
    found.num_computed_tokens = 8
    demand.pass_computed(found)
    assert found.usage.encoded_image_tokens == 0, "it needed no row"
    others = [ready(request(name, 8, (image("x", 0, 4),)), cache, demand) for name in "cd"]
    for other in others:
        take_all(demand, other, 0)
    assert [other.usage.encoded_image_tokens for other in others] == [4, 0]


def test_rows_that_arrive_when_nobody_expects_them_are_counted_by_the_next(
    cache: EncoderCacheManager, demand: RowDemand
) -> None:
    assert not demand.arrived(key("x"), rows(0, 4), 4)
    one = ready(request("a", 8, (image("x", 0, 4),)), cache, demand)
    take_all(demand, one, 0)
    assert one.usage.encoded_image_tokens == 4


def test_an_encode_for_the_end_of_an_image_counts_the_whole_image(
    cache: EncoderCacheManager, demand: RowDemand
) -> None:
    """The shared cache has lost the image, and the prefix cache has three of its four tokens."""
    one = ready(request("a", 8, (image("x", 0, 4),)), cache, demand)
    demand.account_for_hit(one, 3)
    assert one.usage.skipped_image_tokens == 3
    one.num_computed_tokens = 3
    take_all(demand, one, 4)
    usage = one.usage
    assert (usage.encoded_image_tokens, usage.cached_image_tokens, usage.skipped_image_tokens) == (4, 0, 0)
    demand.remove(one)
    assert (usage.encoded_image_tokens, usage.cached_image_tokens, usage.skipped_image_tokens) == (0, 1, 3)


def test_an_encode_after_a_preemption_is_counted_by_the_preempted_request(
    cache: EncoderCacheManager, demand: RowDemand
) -> None:
    one = ready(request("a", 8, (image("x", 0, 4),)), cache, demand)
    take_all(demand, one, 0)
    demand.restart(one)
    one.num_computed_tokens = 0
    cache.reserve(key("y"), rows(0, 10))
    cache.drop(key("y"), rows(0, 10))
    take_all(demand, one, 4)
    assert (one.usage.encoded_image_tokens, one.usage.cached_image_tokens) == (4, 0)
