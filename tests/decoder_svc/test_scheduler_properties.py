"""Traffic that Hypothesis chooses and shrinks, against the oracle and all invariants after every action."""

from __future__ import annotations

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lookonce.families.base import Mask
from tests.decoder_svc.traffic import Traffic

CHOICES = st.randoms(use_true_random=False)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, often as earlier ones slightly changed; rows come late or never; steps run, fail, are aborted."""

    traffic: Traffic

    @initialize(
        deterministic=st.booleans(), window=st.none() | st.integers(1, 6), mask=st.sampled_from(sorted(Mask, key=str))
    )
    def start(self, deterministic: bool, window: int | None, mask: Mask) -> None:
        """Without causal masks nothing is deterministic."""
        is_causal = mask is Mask.CAUSAL
        self.traffic = Traffic(0, deterministic=deterministic and is_causal, window=window, mask=mask)

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
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
