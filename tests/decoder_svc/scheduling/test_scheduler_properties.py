"""Traffic that Hypothesis chooses and shrinks, against the oracle and all invariants after every action."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from decoder_svc.scheduling.prompt import ImageItem, Prompt
from decoder_svc.scheduling.window import Window
from lookonce.families.base import Mask
from tests.decoder_svc.scheduling.simulation import image
from tests.decoder_svc.scheduling.traffic import MODES, Traffic

CHOICES = st.randoms(use_true_random=False)


@st.composite
def masked_prompts(draw: st.DrawFn) -> Prompt:
    """Images anywhere, also side by side."""
    images: list[ImageItem] = []
    end = 0
    for _ in range(draw(st.integers(0, 4))):
        images.append(image("x", end + draw(st.integers(0, 3)), draw(st.integers(1, 5))))
        end = images[-1].span.stop
    num_tokens = end + draw(st.integers(0 if images else 1, 4))
    return Prompt((1,) * num_tokens, tuple(images), mask=draw(st.sampled_from(list(Mask))))


@settings(max_examples=300)
@given(prompt=masked_prompts(), num_generated=st.integers(0, 3), data=st.data())
def test_cuts_are_those_that_brute_force_finds(prompt: Prompt, num_generated: int, data: st.DataObject) -> None:
    """A step may end wherever no span with bidirectional attention crosses the end."""
    num_tokens = len(prompt.token_ids) + num_generated
    start = data.draw(st.integers(0, num_tokens - 1))
    stop = data.draw(st.integers(start + 1, num_tokens))
    seeing = [set(range(span.offset, span.stop)) for span in prompt.mutual_spans]
    cuts = [
        cut
        for cut in range(start + 1, num_tokens + 1)
        if not any(cut - 1 in tokens and cut in tokens for tokens in seeing)
    ]
    assert prompt.last_cut(start, stop) == max([cut for cut in cuts if cut <= stop], default=start)
    # The least is one stretch of tokens that see each other, or what is before the next one: rows of one image at most.
    seen = set[int]().union(*seeing)
    before_any = [cut for cut in cuts if cut <= stop and seen.isdisjoint(range(start, cut))]
    assert prompt.first_cut(start, stop) == (max(before_any) if before_any else min(cuts))


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, often as earlier ones slightly changed; rows come late or never; steps run, fail, are aborted."""

    traffic: Traffic

    @initialize(mode=st.sampled_from(MODES), window=st.none() | st.builds(Window, st.integers(1, 6), st.booleans()))
    def start(self, mode: tuple[Mask, bool], window: Window | None) -> None:
        mask, deterministic = mode
        self.traffic = Traffic(0, mask=mask, deterministic=deterministic, window=window)

    @rule(rng=CHOICES)
    def submit(self, rng: Random) -> None:
        self.traffic.rng = rng
        self.traffic.submit()

    @rule()
    def step(self) -> None:
        self.traffic.step()

    @rule()
    def fail_step(self) -> None:
        self.traffic.fail_step()

    @rule(rng=CHOICES)
    def end_journey(self, rng: Random) -> None:
        self.traffic.rng = rng
        self.traffic.end_journey()

    @rule(rng=CHOICES)
    def abort(self, rng: Random) -> None:
        self.traffic.rng = rng
        self.traffic.abort()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.traffic.target.kv_cache.reset_prefix_cache()

    @invariant()
    def accounts_agree(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.target.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.drain()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40)
