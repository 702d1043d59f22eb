"""Penalties from the device's counts give the tokens of the host's counts, in steps that run ahead and others."""

from __future__ import annotations

import collections
import functools
import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decoder_svc.runner.input_batch import InputBatch, RequestRow
from decoder_svc.runner.sampled.constrained_sample import sample_rows
from decoder_svc.runner.sampled.pending_step import PendingStep
from decoder_svc.runner.sampling import sampling_batch
from decoder_svc.runner.sampling.device_penalties import IN_PROMPT, DevicePenalties
from decoder_svc.runner.sampling.penalties import HostPenalties
from decoder_svc.runner.sampling.sample_row import SampleRow
from decoder_svc.runner.sampling.sampler import Sampler
from decoder_svc.runner.sampling.sampling_batch import stage_batch
from decoder_svc.runner.sampling.sampling_state import SamplingState
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import AdmittedRequest

VOCAB = 90
# Ids of placeholders lie beyond the vocabulary.
NUM_IDS = VOCAB + 5
# Narrower than the vocabulary, so that many draws are repeated over all of it.
SORTED = 12
MAX_NUM_SEQS = 5
MAX_DRAFTS = 3


@pytest.fixture(autouse=True)
def _few_sorted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_batch, "SORTED_TOKENS", SORTED)


def moved(host: Tensor) -> Tensor:
    return host.clone()


def device_penalties(num_slots: int) -> DevicePenalties:
    return DevicePenalties(num_slots, VOCAB, torch.device("cpu"), moved)


@functools.cache
def logits_behind(token_id: int, num_tokens: int) -> Tensor:
    """The model: logits behind a sequence with this length and last token, in bfloat16."""
    generator = torch.Generator().manual_seed(token_id * 1000 + num_tokens)
    return (torch.randn(VOCAB, generator=generator) * 2).bfloat16()


@dataclass(frozen=True)
class Asked:
    """A request, and the answer that the host's counts give it in steps of its own."""

    request_id: RequestId
    prompt: tuple[int, ...]
    params: SamplingParams
    is_masked: bool

    def mask(self, num_output_tokens: int) -> bytes | None:
        """The tokens that may come next."""
        if not self.is_masked:
            return None
        bits = np.random.default_rng(num_output_tokens).random(VOCAB + 6) < 0.7
        return np.packbits(bits, bitorder="little").tobytes()

    @functools.cached_property
    def answer(self) -> list[int]:
        sampler, state = Sampler(moved), SamplingState(self.params.seed, len(self.prompt))
        ids = list(self.prompt)
        while len(ids) < len(self.prompt) + self.params.max_tokens:
            mask = self.mask(len(ids) - len(self.prompt))
            row = SampleRow(self.params, np.array(ids), len(self.prompt), state, mask=mask)
            ids += sampler.sample(logits_behind(ids[-1], len(ids))[None], [row])[0]
        return ids[len(self.prompt) :]


def random_asked(rng: random.Random, index: int) -> Asked:
    sampled: dict[str, Any] = rng.choice(
        ({}, {"temperature": 1.2, "top_k": 30}, {"temperature": 1.5}, {"temperature": 1.0, "top_p": 0.9})
    )
    penalties: dict[str, Any] = rng.choice(
        (
            {},
            {"repetition_penalty": 1.05},
            {"repetition_penalty": 1.6, "frequency_penalty": 0.5},
            {"presence_penalty": 0.7, "frequency_penalty": -0.3},
            {"repetition_penalty": 1.3, "presence_penalty": -0.4, "frequency_penalty": 1.1},
        )
    )
    other: dict[str, Any] = rng.choice(
        (
            {},
            {},
            {"min_tokens": 6, "stop_token_ids": frozenset({2, 5, 9})},
            {"logit_bias": ((1, 3.0), (4, -100.0))},
            {"logprobs": 2},
        )
    )
    params = SamplingParams(max_tokens=rng.randint(3, 16), seed=rng.randrange(1 << 40), **sampled, **penalties, **other)
    prompt = tuple(rng.randrange(NUM_IDS) for _ in range(rng.randint(1, 30)))
    return Asked(RequestId(f"r{index}"), prompt, params, rng.random() < 0.07)


class Served:
    """Steps of a random workload: requests join, leave, are preempted and have drafts; a step runs ahead if it may."""

    def __init__(self, seed: int, penalties: DevicePenalties) -> None:
        self._rng = random.Random(seed)
        self._sampler = Sampler(moved, penalties=penalties)
        self._has_drafts = seed % 3 == 0
        self.batch = InputBatch(4, 1, has_sliding_group=False)
        self.asked = {(asked := random_asked(self._rng, index)).request_id: asked for index in range(12)}
        self._waiting = list(self.asked)
        self._running: list[RequestId] = []
        self._sampled = torch.zeros(0, dtype=torch.int64)
        self.output: dict[RequestId, list[int]] = {request_id: [] for request_id in self.asked}
        self.counted: collections.Counter[str] = collections.Counter()

    def serve(self) -> None:
        """Serves all requests to their ends, or to where they were aborted."""
        before: PendingStep | None = None
        while self._waiting or self._running or before is not None:
            self._schedule()
            step = self._launch()
            self.counted["ahead"] += before is not None and step is not None
            if before is not None:
                self._settle(before)
            before = step
            # The scheduler lets nothing run ahead where requests may have drafts.
            if before is not None and (self._has_drafts or not before.may_run_ahead):
                self._settle(before)
                before = None

    def _schedule(self) -> None:
        """Preempts, aborts and admits requests."""
        rng = self._rng
        for request_id in list(self._running):
            if rng.random() < 0.02:
                self.counted["aborted"] += 1
                self._leave(request_id)
            elif rng.random() < 0.05 and self.batch[request_id].unknown_place is None:
                self.counted["preempted"] += 1
                self._leave(request_id)
                self._waiting.insert(0, request_id)
        while self._waiting and len(self._running) < MAX_NUM_SEQS and rng.random() < 0.8:
            asked = self.asked[self._waiting.pop(0)]
            ids = asked.prompt + tuple(self.output[asked.request_id])
            self.batch.add(AdmittedRequest(asked.request_id, ids, len(asked.prompt), (), None, (), asked.params))
            self._running.append(asked.request_id)

    def _leave(self, request_id: RequestId) -> None:
        self._running.remove(request_id)
        self.batch.remove(request_id)

    def _launch(self) -> PendingStep | None:
        # No step is launched for a request that certainly ends.
        names = [
            name
            for name in self._running
            if self._rng.random() < 0.9 and len(self.batch[name].token_ids) < self._longest(name)
        ]
        if not names:
            return None
        self._rng.shuffle(names)
        step = PendingStep()
        cut = self._rng.choice((len(names), len(names), self._rng.randint(0, len(names))))
        for part in (names[:cut], names[cut:]):
            if part:
                self._launch_pass(part, step)
        self._sampled = torch.cat(step.sampled_ids)
        return step

    def _longest(self, name: RequestId) -> int:
        return len(self.asked[name].prompt) + self.asked[name].params.max_tokens

    def _launch_pass(self, names: Sequence[RequestId], step: PendingStep) -> None:
        rows = [self.batch[name] for name in names]
        for name, row in zip(names, rows, strict=True):
            row.set_drafts(self._drafts(name, row))
        samples = [
            replace(sample, mask=self.asked[name].mask(sample.num_output_tokens))
            for name, row in zip(names, rows, strict=True)
            for sample in sample_rows([row], [None])
        ]
        logits = torch.stack([logits for row in rows for logits in self._logits(row)])
        likeliest = logits.float().argmax(1) if self._rng.random() < 0.5 else None
        step.add(self._sampler.launch(logits, samples, likeliest), names, rows)
        # The memory of logits is used again.
        logits.fill_(torch.nan)

    def _drafts(self, name: RequestId, row: RequestRow) -> tuple[int, ...]:
        if not self._has_drafts or row.unknown_place is not None or self._rng.random() < 0.5:
            return ()
        room = self._longest(name) - row.num_tokens - 1
        right = self.asked[name].answer[row.num_tokens - row.num_prompt_tokens :]
        num_drafts = max(0, min(room, self._rng.randint(0, MAX_DRAFTS)))
        return tuple(each if self._rng.random() < 0.8 else 7 for each in right[:num_drafts])

    def _logits(self, row: RequestRow) -> list[Tensor]:
        """Computes the logits of a row's contexts, as the device does: with the id that it sampled itself."""
        contexts = row.contexts()
        if row.unknown_place is not None:
            return [logits_behind(int(self._sampled[row.unknown_place]), row.num_tokens)]
        return [logits_behind(int(context[-1]), len(context)) for context in contexts]

    def _settle(self, step: PendingStep) -> None:
        for token in step.tokens():
            if token.request_id not in self._running:
                continue
            self.counted["corrected"] += token.is_corrected
            self.counted["taken"] += 1
            output = self.output[token.request_id]
            output.append(token.token_id)
            if len(output) == self.asked[token.request_id].params.max_tokens:
                self._leave(token.request_id)


def serve(seed: int, num_slots: int = MAX_NUM_SEQS) -> tuple[Served, DevicePenalties]:
    penalties = device_penalties(num_slots)
    served = Served(seed, penalties)
    served.serve()
    return served, penalties


@pytest.mark.parametrize("num_slots", [MAX_NUM_SEQS, 2])
@pytest.mark.parametrize("seed", range(30))
def test_tokens_are_those_of_the_hosts_counts(seed: int, num_slots: int) -> None:
    served, penalties = serve(seed, num_slots)
    for asked in served.asked.values():
        output = served.output[asked.request_id]
        assert output == asked.answer[: len(output)], asked
    assert penalties.num_free_slots == num_slots


def test_workloads_are_worth_testing_with() -> None:
    counted: collections.Counter[str] = collections.Counter()
    for seed in range(10):
        counted += serve(seed)[0].counted
    assert min(counted[name] for name in ("ahead", "aborted", "preempted", "corrected", "taken")) >= 8, counted
    assert counted["ahead"] > 100, counted


def row(params: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...] = ()) -> SampleRow:
    return SampleRow(params, np.array(prompt + output), len(prompt), SamplingState(params.seed, len(prompt)))


def penalised_by(penalties: HostPenalties | DevicePenalties, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    params = tuple(one.params for one in rows)
    batch = stage_batch(params, (False,) * len(rows), VOCAB, moved)
    return penalties.apply(logits, rows, batch).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_repetition", [True, False])
def test_penalised_logits_have_every_bit_of_the_hosts(dtype: torch.dtype, has_repetition: bool) -> None:
    rng = random.Random(3)
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(9):
        params = SamplingParams(
            repetition_penalty=rng.choice((1.05, 0.3, 1e-40)) if has_repetition else 1.0,
            presence_penalty=rng.uniform(-2, 2),
            frequency_penalty=rng.uniform(-2, 2),
        )
        ids = [tuple(rng.randrange(NUM_IDS) for _ in range(length)) for length in (40, 70)]
        rows.append(row(SamplingParams() if index == 4 else params, *ids))
    logits = (torch.randn(len(rows), VOCAB, generator=generator) * 30).to(dtype)
    logits[3, :8] = torch.inf
    logits[5, :8] = -torch.inf
    before = logits.clone()
    wanted = penalised_by(HostPenalties(moved), logits, rows)
    # Two rows have no slot.
    found = penalised_by(device_penalties(6), logits, rows)
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
    assert torch.equal(logits, before)


def counts_of(penalties: DevicePenalties, state: SamplingState) -> dict[int, int]:
    assert state.slot is not None
    counts = penalties._counts[state.slot.index]
    return {int(each): int(counts[each]) for each in counts.nonzero()[:, 0]}


def test_a_slot_is_used_again_without_the_counts_of_the_request_before() -> None:
    penalties = device_penalties(1)
    params = SamplingParams(repetition_penalty=1.4)
    logits = torch.ones(1, VOCAB)
    first, second = row(params, (1, 2, 2), (3, 3)), row(params, (4,), (2,))
    penalised_by(penalties, logits, [first])
    assert counts_of(penalties, first.state) == {1: IN_PROMPT, 2: IN_PROMPT, 3: 2}
    penalised_by(penalties, logits, [second])
    assert second.state.slot is None, "the host penalises it"
    first.state.release()
    penalised_by(penalties, logits, [second])
    assert counts_of(penalties, second.state) == {4: IN_PROMPT, 2: 1}
    first.state.release()
    assert penalties.num_free_slots == 0, "a slot is given back once"
    del second
    gc.collect()
    assert penalties.num_free_slots == 1


def test_what_was_counted_in_vain_does_not_concern_the_slots_next_request() -> None:
    """A step may be read after its request has left the batch."""
    penalties = device_penalties(1)
    params = SamplingParams(repetition_penalty=1.4)
    first, second = row(params, (1, 2)), row(params, (4,))
    batch = stage_batch((params,), (False,), VOCAB, moved)
    step = penalties.apply(torch.ones(1, VOCAB), [first], batch)
    step.count(torch.tensor([0]))
    first.state.release()
    behind = penalties.apply(torch.ones(1, VOCAB), [second], batch)
    behind.count(torch.tensor([9]))
    step.forget([0])
    # The host does not know the last id, so it cannot count anew.
    longer = replace(second, token_ids=np.array([4, 0]), is_known=False)
    penalties.apply(torch.ones(1, VOCAB), [longer], batch)
    assert counts_of(penalties, second.state) == {4: IN_PROMPT, 9: 1}


Mutation = Callable[[pytest.MonkeyPatch], None]


def sampled_ids_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    def count(self: DevicePenalties, staged: object, slots: Sequence[object], token_ids: Tensor) -> None:
        for slot in slots:
            slot.num_counted += 1  # type: ignore[attr-defined]

    patch.setattr(DevicePenalties, "_count", count)


def repeated_draws_are_not_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("decoder_svc.runner.sampling.device_penalties._forget", lambda versions, indexes: None)


def slots_keep_the_counts_of_the_request_before(patch: pytest.MonkeyPatch) -> None:
    init = DevicePenalties.__init__

    class Unfilled(Tensor):  # type: ignore[misc]  # torch is untyped here
        def index_fill_(self, dim: int, index: Tensor, value: int) -> Tensor:
            return self if value == 0 else super().index_fill_(dim, index, value)

    def with_unfilled(self: DevicePenalties, *arguments: object) -> None:
        init(self, *arguments)  # type: ignore[arg-type]
        self._counts = self._counts.as_subclass(Unfilled)

    patch.setattr(DevicePenalties, "__init__", with_unfilled)


def rows_behind_drafts_are_counted_for_good(patch: pytest.MonkeyPatch) -> None:
    slot = DevicePenalties._slot
    patch.setattr(DevicePenalties, "_slot", lambda self, row: slot(self, replace(row, num_drafts=0)))


def slots_are_never_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SamplingState, "release", lambda self: None)
    patch.setattr("weakref.finalize.__call__", lambda self, _=None: None)


def is_noticed(seed: int) -> bool:
    try:
        test_tokens_are_those_of_the_hosts_counts(seed, MAX_NUM_SEQS)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(
    "mutation",
    [
        sampled_ids_are_not_counted,
        repeated_draws_are_not_forgotten,
        slots_keep_the_counts_of_the_request_before,
        rows_behind_drafts_are_counted_for_good,
        slots_are_never_given_back,
    ],
)
def test_each_fault_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    assert any(is_noticed(seed) for seed in range(10))
