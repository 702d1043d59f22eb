"""Arbitrary traffic against the scheduler's invariants, checked after every step."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decoder_svc.request import ImageItem, Request, RequestState, RowSource
from decoder_svc.scheduler_output import SampledToken, SchedulerOutput
from lookonce.content_key import ContentKey
from tests.decoder_svc.scheduling import image, request, scheduler

CACHE_ROWS = 12
NUM_BLOCKS = 8
TOKEN_BUDGET = 9


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, rows come late or never, steps run, requests are aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.target = scheduler(token_budget=TOKEN_BUDGET, num_blocks=NUM_BLOCKS, cache_rows=CACHE_ROWS, max_num_seqs=3)
        self.requests: list[Request] = []
        self.travelling: list[ContentKey] = []
        self.resident: set[ContentKey] = set()
        self.computed: dict[str, int] = {}

    @rule(
        gaps=st.lists(st.tuples(st.integers(0, 4), st.sampled_from("uvwxyz"), st.integers(1, 8)), max_size=2),
        tail=st.integers(1, 5),
        max_tokens=st.integers(1, 4),
        priority=st.integers(-1, 1),
    )
    def submit(self, gaps: list[tuple[int, str, int]], tail: int, max_tokens: int, priority: int) -> None:
        images: list[ImageItem] = []
        offset = 0
        for gap, name, num_rows in gaps:
            images.append(image(f"{name}{num_rows}", offset + gap, num_rows))
            offset += gap + num_rows
        name = f"r{len(self.requests)}"
        new = request(
            name, offset + tail, tuple(images), max_tokens=max_tokens, priority=priority, arrival_s=len(self.requests)
        )
        self.requests.append(new)
        self.target.add(new)

    @rule()
    def run_step(self) -> None:
        output = self.target.schedule()
        self._check(output)
        sampled = [SampledToken(chunk.request_id, 7, None) for chunk in output.chunks if chunk.samples]
        self.target.update(output, sampled)
        self.travelling += [fetch.key for fetch in output.fetches]

    def _check(self, output: SchedulerOutput) -> None:
        assert output.num_scheduled_tokens <= TOKEN_BUDGET
        self.resident -= set(output.evicted_keys)
        for request_id in output.released:
            self.computed.pop(request_id, None)
        for admitted in output.admitted:
            self.computed[admitted.request_id] = 0
        for chunk in output.chunks:
            assert chunk.num_tokens >= 1
            assert chunk.start == self.computed[chunk.request_id], "tokens are computed once, in order"
            self.computed[chunk.request_id] += chunk.num_tokens
            live = self.target.request(chunk.request_id)
            stop = chunk.start + chunk.num_tokens
            for item in live.prompt.images:
                needs_rows = item.rows_between(chunk.start, stop) != (0, 0)
                assert not needs_rows or item.key in self.resident, "a chunk crosses a row that is not there"

    @precondition(lambda self: self.travelling)
    @rule(data=st.data(), fails=st.booleans())
    def rows_end_their_journey(self, data: st.DataObject, fails: bool) -> None:
        key = self.travelling.pop(data.draw(st.integers(0, len(self.travelling) - 1)))
        if fails:
            self.target.rows_failed(key, had_data=True)
        elif self.target.rows_arrived(key, RowSource.ENCODED):
            self.resident.add(key)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.target.abort(data.draw(st.sampled_from(self.requests)).request_id)

    @invariant()
    def accounts_agree(self) -> None:
        self.target.check_integrity()

    def teardown(self) -> None:
        """Left alone, everything ends: no lost request, no deadlock, nothing held."""
        for _ in range(400):
            if not self.target.has_requests():
                break
            self.run_step()
            while self.travelling:
                key = self.travelling.pop()
                if self.target.rows_arrived(key, RowSource.ENCODED):
                    self.resident.add(key)
        assert all(one.state is RequestState.FINISHED for one in self.requests)
        self.target.check_integrity()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
