from __future__ import annotations

import collections
import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from decoder_svc.runner.cpu.attention import SOURCES
from decoder_svc.runner.cpu.native_sampler import NativeSampler
from decoder_svc.runner.sampling import sampler, sampling_batch
from decoder_svc.runner.sampling.device_penalties import DevicePenalties
from decoder_svc.runner.sampling.penalties import PenalisedLogits
from decoder_svc.runner.sampling.sample_row import SampleRow
from decoder_svc.runner.sampling.sampler import Sampler
from decoder_svc.runner.sampling.sampling_batch import SamplingBatch
from decoder_svc.runner.sampling.sampling_state import SamplingState, TokenCounts, UniformDraws
from decoder_svc.scheduling.request_output import TokenLogprobs
from decoder_svc.scheduling.sampling_params import SamplingParams
from lookonce.model.kernels.native_level import processor_levels
from lookonce.model.kernels.native_library import library_of_level
from tests.decoder_svc.runner.sampling import sampling_reference

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])


def row(params: SamplingParams, prompt: tuple[int, ...] = (0,), output: tuple[int, ...] = ()) -> SampleRow:
    state = SamplingState(params.seed, len(prompt))
    return SampleRow(params, np.array(prompt + output, dtype=np.int64), len(prompt), state)


class AnyVocabulary:
    """Counts of tokens on the device, made for the vocabulary of the first logits. Some rows get no slot."""

    def __init__(self) -> None:
        self._made: DevicePenalties | None = None

    def apply(self, logits: torch.Tensor, rows: Sequence[SampleRow], batch: SamplingBatch) -> PenalisedLogits:
        if self._made is None:
            self._made = DevicePenalties(4, logits.shape[1], logits.device, lambda host: host)
        return self._made.apply(logits, rows, batch)


# The samplers, of which each test below takes the current one.
SAMPLERS: dict[str, Callable[[], Sampler | NativeSampler]] = {
    "torch": lambda: Sampler(lambda host: host),
    "device": lambda: Sampler(lambda host: host, penalties=AnyVocabulary()),
    **{
        level.name: functools.partial(lambda level: NativeSampler(library_of_level(SOURCES, level), 2), level)
        for level in processor_levels()
    },
}
current = "torch"


@pytest.fixture(autouse=True, params=SAMPLERS)
def _sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "current", request.param)


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Samples one step with a new sampler."""
    sampled = SAMPLERS[current]().launch(logits, rows).result()
    return sampled.token_ids, sampled.logprobs


def draw(params: SamplingParams, num_draws: int = 3000, logits: torch.Tensor = LOGITS) -> dict[int, float]:
    """Returns the relative frequencies of sampled tokens over seeds."""
    rows = [row(replace(params, seed=seed)) for seed in range(num_draws)]
    counts = collections.Counter(sample(logits.expand(num_draws, -1), rows)[0])
    return {token: count / num_draws for token, count in counts.items()}


def test_greedy_takes_the_most_likely() -> None:
    assert sample(LOGITS[None], [row(SamplingParams())])[0] == [0]


def test_sampling_follows_the_softmax_at_its_temperature() -> None:
    frequencies = draw(SamplingParams(temperature=0.7))
    expected = (LOGITS / 0.7).softmax(0)
    for token in range(5):
        assert frequencies.get(token, 0) == pytest.approx(float(expected[token]), abs=0.04)


def test_top_k_keeps_k_tokens() -> None:
    assert set(draw(SamplingParams(temperature=2.0, top_k=2))) == {0, 1}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probabilities = LOGITS.softmax(0).tolist()
    assert probabilities[0] < 0.7 < probabilities[0] + probabilities[1]
    assert set(draw(SamplingParams(temperature=1.0, top_p=0.7))) == {0, 1}
    assert set(draw(SamplingParams(temperature=1.0, top_p=0.01))) == {0}


def test_min_p_is_relative_to_the_most_likely() -> None:
    ratios = (LOGITS - LOGITS[0]).exp().tolist()
    keep = {token for token, ratio in enumerate(ratios) if ratio >= 0.2}
    assert set(draw(SamplingParams(temperature=1.0, min_p=0.2))) == keep == {0, 1, 2}


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    params = SamplingParams(temperature=1.5, seed=42)
    alone = sample(LOGITS[None], [row(params)])[0][0]
    others = [row(SamplingParams(temperature=1.5, seed=seed)) for seed in range(6)]
    together = sample(LOGITS.expand(7, -1), [*others, row(params)])[0]
    assert together[6] == alone
    assert len(set(together[:6])) > 1


def test_the_draw_changes_from_token_to_token() -> None:
    params = SamplingParams(temperature=3.0, seed=1)
    drawn = [sample(LOGITS[None], [row(params, output=(2,) * index)])[0][0] for index in range(20)]
    assert len(set(drawn)) > 1


@pytest.mark.parametrize("narrowing", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3}])
@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-6, 0.01])
def test_a_very_low_temperature_is_nearly_greedy(temperature: float, narrowing: dict[str, Any]) -> None:
    params = SamplingParams(temperature=temperature, seed=3, **narrowing)
    assert sample(LOGITS[None], [row(params)])[0] == [int(LOGITS.argmax())]


@pytest.mark.parametrize("narrowing", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 2}])
@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e-3])
def test_a_very_small_repetition_penalty_makes_seen_tokens_sure(penalty: float, narrowing: dict[str, Any]) -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=penalty, seed=3, **narrowing)
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert sample(logits, [row(params, prompt=(1,))])[0] == [1]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("narrowing", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 2}])
def test_nan_logits_do_not_affect_other_requests(wrong: float, narrowing: dict[str, Any]) -> None:
    """NaN logits may give their own request any token, but the other requests must get theirs as usual."""
    sick = torch.full_like(LOGITS, wrong)
    params = SamplingParams(temperature=0.7, seed=3, **narrowing)
    (of_sick, of_well), _ = sample(torch.stack([sick, LOGITS]), [row(params), row(params)])
    assert of_sick in range(len(LOGITS))
    assert [of_well] == sample(LOGITS[None], [row(params)])[0]


def test_ids_beyond_the_vocabulary_have_no_logits_to_penalise() -> None:
    """Placeholders of images have such ids."""
    params = SamplingParams(repetition_penalty=1.5)
    logits = torch.tensor([[2.0, 1.9, 0.0]])
    assert sample(logits, [row(params, prompt=(0, 3, 99, 99))])[0] == [1]


def test_seeds_may_have_64_bits() -> None:
    assert sample(LOGITS[None], [row(SamplingParams(temperature=1.0, seed=2**64 - 1))])[0][0] in range(5)


def test_penalties_and_biases_touch_their_own_row_only() -> None:
    logits = torch.tensor([[2.0, 1.9, 0.0], [2.0, 1.9, 0.0]])
    before = logits.clone()
    penalised = row(SamplingParams(repetition_penalty=1.5), prompt=(0,))
    assert sample(logits, [penalised, row(SamplingParams())])[0] == [1, 0]
    biased = row(SamplingParams(logit_bias=((2, 5.0),)))
    assert sample(logits, [row(SamplingParams()), biased])[0] == [0, 2]
    assert torch.equal(logits, before)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.4]])
    present = SamplingParams(presence_penalty=1.5)
    assert sample(logits, [row(present, prompt=(0, 0))])[0] == [0]
    assert sample(logits, [row(present, output=(0,))])[0] == [1]
    frequent = SamplingParams(frequency_penalty=0.6)
    assert sample(logits, [row(frequent, output=(0,))])[0] == [0]
    assert sample(logits, [row(frequent, output=(0, 0))])[0] == [1]


def test_stop_ids_wait_for_min_tokens() -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=frozenset({0}))
    taken = [sample(LOGITS[None], [row(params, output=(1,) * index)])[0][0] for index in range(4)]
    assert taken == [1, 1, 1, 0]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    params = SamplingParams(temperature=0.5, top_k=1, seed=3, logprobs=2)
    token_ids, logprobs = sample(LOGITS[None], [row(params)])
    expected = LOGITS.log_softmax(0).tolist()
    assert logprobs[0] is not None
    first_id, first_logprob = logprobs[0].top[0]
    assert first_id == token_ids[0]
    assert first_logprob == pytest.approx(expected[first_id])
    assert [token for token, _ in logprobs[0].top[1:]] == [0, 1]
    assert all(math.isfinite(value) for _, value in logprobs[0].top)
    assert sample(LOGITS[None], [row(SamplingParams())])[1] == [None]


VOCAB = 1000
# Narrower than the vocabulary, so that draws fall beyond the sorted tokens.
SORTED = 16
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.3, 1.0, 3.0)),
    top_p=st.sampled_from((1.0, 0.999, 0.9, 0.3)),
    top_k=st.sampled_from((None, 1, 5, SORTED, 40, VOCAB)),
    min_p=st.sampled_from((0.0, 0.001, 0.2)),
    repetition_penalty=st.sampled_from((1.0, 1.3, 0.8)),
    presence_penalty=st.sampled_from((0.0, 0.7)),
    frequency_penalty=st.sampled_from((0.0, -0.4)),
    logit_bias=st.sampled_from(((), ((3, 4.0), (7, -math.inf)))),
    min_tokens=st.sampled_from((0, 2)),
    stop_token_ids=st.sampled_from((frozenset[int](), frozenset({1, 2, 3}))),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from((None, 0, 4)),
)
TOKENS = st.lists(st.integers(0, VOCAB + 20), min_size=1, max_size=12).map(tuple)


@settings(deadline=None)
@given(batch=st.lists(st.tuples(PARAMS, TOKENS, TOKENS), min_size=1, max_size=6), seed=st.integers(0, 1 << 30))
@example([(SamplingParams(temperature=3.0, seed=seed), (0,), (1,)) for seed in range(6)], 0)
@example([(SamplingParams(temperature=3.0, top_k=40, seed=seed), (0,), (1,)) for seed in range(6)], 0)
def test_every_row_gets_the_references_token_in_any_batch(
    batch: list[tuple[SamplingParams, tuple[int, ...], tuple[int, ...]]], seed: int
) -> None:
    logits = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    rows = [row(*each) for each in batch]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_batch, "SORTED_TOKENS", SORTED)
        token_ids, logprobs = sample(logits, rows)
        alone = [sample(logits[[index]], [each]) for index, each in enumerate(rows)]
    assert alone == [([token_id], [logprob]) for token_id, logprob in zip(token_ids, logprobs, strict=True)]
    for (params, prompt, output), row_logits, token_id in zip(batch, logits.double().numpy(), token_ids, strict=True):
        adjusted = sampling_reference.adjusted(row_logits, params, list(prompt), list(output))
        point = sampling_reference.uniform(params.seed or 0, len(output))
        assert token_id in sampling_reference.possible_tokens(adjusted, params, point, 1e-5)


@pytest.mark.parametrize("_sampler", ["torch"], indirect=True)
def test_a_draw_beyond_the_sorted_tokens_is_repeated_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_batch, "SORTED_TOKENS", 2)
    assert set(draw(SamplingParams(temperature=9.0))) == set(range(5))
    assert set(draw(SamplingParams(temperature=9.0, top_k=4))) == {0, 1, 2, 3}
    assert set(draw(SamplingParams(temperature=1.0, min_p=0.2))) == {0, 1, 2}


@pytest.mark.parametrize("_sampler", ["torch"], indirect=True)
def test_few_rows_sort_the_whole_vocabulary_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a batch of flat distributions would take gigabytes, and start-up would keep them free."""
    monkeypatch.setattr(sampling_batch, "SORTED_TOKENS", 2)
    shapes: list[tuple[int, ...]] = []
    right = sampler.draw

    def noted(logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
        shapes.append(tuple(logits.shape))
        return right(logits, *arguments)

    monkeypatch.setattr(sampler, "draw", noted)
    flat = torch.zeros(11, 50)
    for top_k in (None, 20):
        shapes.clear()
        sample(flat, [row(SamplingParams(temperature=1.0, top_k=top_k, seed=seed)) for seed in range(11)])
        whole = shapes[1:] if top_k is None else shapes
        assert max(whole) == (4, 50)
        assert sum(length for length, _ in whole) >= 8


@pytest.mark.parametrize("_sampler", ["torch"], indirect=True)
def test_parameters_are_copied_again_only_if_the_batch_changes() -> None:
    copied: list[torch.Tensor] = []

    def move(host: torch.Tensor) -> torch.Tensor:
        copied.append(host)
        return host

    made = Sampler(move)
    rows = [row(SamplingParams(temperature=1.0, top_p=0.9, min_tokens=1, stop_token_ids=frozenset({1}), seed=1))] * 2
    made.sample(LOGITS.expand(2, -1), rows)
    num_staged = len(copied)
    copied.clear()
    made.sample(LOGITS.expand(2, -1), rows)
    assert len(copied) == 1, "the random numbers alone"
    for changed in ([rows[0]], [rows[0], replace(rows[1], params=replace(rows[1].params, top_p=0.2))]):
        copied.clear()
        made.sample(LOGITS.expand(len(changed), -1), changed)
        assert len(copied) == num_staged
    copied.clear()
    longer = [replace(each, token_ids=np.array([0, 2])) for each in changed]
    made.sample(LOGITS.expand(2, -1), longer)
    assert len(copied) == num_staged - 1, "stop ids are allowed now"


def test_the_numbers_of_a_seed_do_not_depend_on_the_order_in_which_they_are_asked_for() -> None:
    for seed in (0, 2**64 - 1):
        draws = UniformDraws(seed)
        for index in (0, 1, 2, 40, 39, 5, 200, 64, 63):
            assert draws[index] == sampling_reference.uniform(seed, index)


@given(prompt=TOKENS, output=st.lists(st.integers(0, 5), max_size=9), cuts=st.sets(st.integers(0, 9)))
def test_counts_grow_with_the_sequence(prompt: tuple[int, ...], output: list[int], cuts: set[int]) -> None:
    counts = TokenCounts(len(prompt))
    for stop in sorted({*(min(cut, len(output)) for cut in cuts), len(output)}):
        ids, occurrences = counts.update(np.array([*prompt, *output[:stop]]))
        expected = collections.Counter(output[:stop])
        assert sorted(ids.tolist()) == sorted({*prompt, *output[:stop]})
        assert dict(zip(ids.tolist(), occurrences.tolist(), strict=True)) == {
            each: expected[each] for each in ids.tolist()
        }


def test_dropped_drafts_are_not_counted() -> None:
    params = SamplingParams(frequency_penalty=0.6)
    known = row(params, output=(0,))
    draft = replace(known, token_ids=np.array([0, 0, 0]), num_drafts=1)
    logits = torch.tensor([[2.0, 1.0, 0.4]])
    assert sample(logits.expand(2, -1), [known, draft])[0] == [0, 1]
    assert sample(logits, [known])[0] == [0]


def masked(params: SamplingParams, *allowed: int, output: tuple[int, ...] = ()) -> SampleRow:
    """A row that may have only these tokens next."""
    bits = np.zeros(32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return replace(row(params, output=output), mask=np.packbits(bits, bitorder="little").tobytes())


def test_a_mask_excludes_tokens_from_greedy_and_sampled_rows_and_from_no_other_row() -> None:
    greedy, sampled = SamplingParams(), SamplingParams(temperature=3.0, seed=5)
    rows = [row(greedy), masked(greedy, 2, 4), masked(sampled, 3), row(sampled), masked(greedy, 0)]
    free = sample(LOGITS[None], [row(sampled)])[0][0]
    assert sample(LOGITS.expand(5, -1), rows)[0] == [0, 2, 3, free, 0]


def test_a_masked_draw_follows_the_distribution_of_what_is_left() -> None:
    rows = [masked(SamplingParams(temperature=1.0, seed=seed), 0, 2, 3) for seed in range(3000)]
    counts = collections.Counter(sample(LOGITS.expand(3000, -1), rows)[0])
    left = LOGITS[[0, 2, 3]].softmax(0).tolist()
    assert set(counts) == {0, 2, 3}
    for token, share in zip((0, 2, 3), left, strict=True):
        assert counts[token] / 3000 == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize("vocab", [5, 300, 1000])
def test_masked_draws_of_a_large_vocabulary_never_leave_the_mask(vocab: int) -> None:
    """Also where the draw lies beyond the sorted tokens, whose weights are all zero."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(400, vocab, generator=generator)
    bits = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    bits[[1, vocab - 1]] = 1
    mask = np.packbits(bits, bitorder="little").tobytes()
    rows = [replace(row(SamplingParams(temperature=5.0, seed=seed)), mask=mask) for seed in range(400)]
    assert set(sample(logits, rows)[0]) == {1, vocab - 1}


def test_a_mask_is_stronger_than_biases_and_min_tokens() -> None:
    never = SamplingParams(logit_bias=((2, -math.inf), (4, -math.inf)))
    assert sample(LOGITS[None], [masked(never, 2, 4)])[0] == [2]
    assert sample(LOGITS.flip(0)[None], [masked(never, 2, 4)])[0] == [4]
    assert sample(LOGITS[None], [masked(never, 2, 3, 4)])[0] == [3]
    below = SamplingParams(min_tokens=3, stop_token_ids=frozenset({1}))
    assert sample(LOGITS[None], [masked(below, 1)])[0] == [1]


def test_log_probabilities_are_those_without_the_mask() -> None:
    tokens, logprobs = sample(LOGITS[None], [masked(SamplingParams(logprobs=1), 3)])
    assert tokens == [3]
    assert logprobs[0] is not None
    assert [token_id for token_id, _ in logprobs[0].top] == [3, 0]
    expected = LOGITS.log_softmax(0)[[3, 0]].tolist()
    assert [number for _, number in logprobs[0].top] == pytest.approx(expected)


def test_rows_with_masks_keep_the_next_step_waiting_and_the_likeliest_ids_are_not_taken() -> None:
    launched = SAMPLERS[current]().launch(LOGITS[None], [masked(SamplingParams(), 4)], torch.tensor([0]))
    assert not launched.may_run_ahead
    assert launched.result().token_ids == [4]


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0])
@pytest.mark.parametrize(
    "narrowing", [{}, {"top_p": 0.5}, {"top_p": 0.999}, {"top_k": 3000}, {"min_p": 0.3}, {"top_k": 2500, "top_p": 0.9}]
)
def test_flat_rows_of_a_large_vocabulary_get_the_references_tokens(spread: float, narrowing: dict[str, Any]) -> None:
    """Draws that fall on none of the likeliest tokens. Some logits are equal, as in bfloat16."""
    logits = torch.randn(24, 6007, generator=torch.Generator().manual_seed(1)) * spread
    logits[::2] = logits[::2].bfloat16().float()
    rows = [row(SamplingParams(temperature=1.0, seed=seed, **narrowing)) for seed in range(24)]
    token_ids, _ = sample(logits, rows)
    for one, row_logits, token_id in zip(rows, logits.double().numpy(), token_ids, strict=True):
        point = sampling_reference.uniform(one.params.seed or 0, 0)
        possible = sampling_reference.possible_tokens(row_logits, one.params, point, 1e-4)
        # Equal logits have one order here and another one there.
        assert row_logits[token_id] in {row_logits[each] for each in possible}


def _heaps(noise: torch.Tensor) -> torch.Tensor:
    """Two groups of tokens with nothing between them."""
    logits = noise * 0.05
    logits[:, ::3] -= 6.0
    return logits


def _excluded(noise: torch.Tensor) -> torch.Tensor:
    """A padded vocabulary: many logits are -inf."""
    logits = noise.clone()
    logits[:, 3000:] = -math.inf
    return logits


def _spike(noise: torch.Tensor) -> torch.Tensor:
    """One likely token over tens of thousands of equal ones."""
    logits = noise * 0.0
    logits[:, 77] = 9.0
    return logits


# Distributions of logits, most of which are far from the normal one.
SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda noise: noise,
    "steps": lambda noise: noise.mul(2).round() / 2,
    "heavy tails": lambda noise: (noise / noise.roll(1, 1)).clamp(-30, 30),
    "one side": lambda noise: -noise.abs().log().abs(),
    "other side": lambda noise: noise.abs().log().clamp(min=-20),
    "even": lambda noise: torch.linspace(0, -4, noise.shape[1]).expand(noise.shape).contiguous(),
    "heaps": _heaps,
    "excluded": _excluded,
    "spike": _spike,
}


@pytest.mark.parametrize("vocab", [49_152, 49_155])
@pytest.mark.parametrize("shape", SHAPES)
def test_draws_from_any_distribution_are_the_references(shape: str, vocab: int) -> None:
    """A place far down is sought where it would be in a normal distribution, and must be found where it is."""
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_p": 0.3}, {"top_k": 20_000, "top_p": 0.8}, {"min_p": 0.05}]
    logits = SHAPES[shape](torch.randn(3 * len(kinds), vocab, generator=torch.Generator().manual_seed(2)))
    before = logits.clone()
    rows = [
        row(SamplingParams(temperature=temperature, seed=seed, **kind))
        for seed, (kind, temperature) in enumerate(itertools.product(kinds, (0.3, 0.8, 4.0)))
    ]
    token_ids, _ = sample(logits, rows)
    assert torch.equal(logits, before)
    for one, row_logits, token_id in zip(rows, logits.double().numpy(), token_ids, strict=True):
        point = sampling_reference.uniform(one.params.seed or 0, 0)
        possible = sampling_reference.possible_tokens(row_logits, one.params, point, 1e-5)
        assert row_logits[token_id] in {row_logits[each] for each in possible}, one.params


@pytest.mark.parametrize("vocab", [2, 5, 63, 64, 200, 1000, 49_155])
def test_the_likeliest_tokens_are_reported_in_their_order(vocab: int) -> None:
    """The smaller id of equal logits comes first. Excluded tokens and NaN are left out."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(40, vocab, generator=generator)
    logits[10:20] = logits[10:20].round()
    logits[20:22] = 0.5
    logits[22:26, : vocab // 2] = -torch.inf
    logits[26, :] = -torch.inf
    logits[27:30][torch.rand(3, vocab, generator=generator) < 0.2] = torch.nan
    bias = SamplingParams(logit_bias=((0, 100.0), (vocab - 1, -100.0)))
    penalised = SamplingParams(frequency_penalty=2.0, presence_penalty=0.5)
    rows = [
        replace(row([SamplingParams(), bias, penalised][index % 3], output=(0,)), num_likeliest=index % 9)
        for index in range(len(logits))
    ]
    sampler = SAMPLERS[current]()
    found = sampler.launch(logits, rows).result()
    if not sampler.is_immediate:
        assert found.likeliest == ()
        return
    for index, of_row in enumerate(found.likeliest):
        adjusted = logits[index].clone()
        if rows[index].params is bias:
            adjusted[0] += 100
            adjusted[-1] -= 100
        if rows[index].params is penalised:
            adjusted[0] -= 2.5
        ids = [token_id for token_id in range(vocab) if adjusted[token_id] > -torch.inf]
        ids.sort(key=lambda token_id: (-float(adjusted[token_id]), token_id))
        assert of_row == ids[: rows[index].num_likeliest], index
        if of_row:
            assert found.token_ids[index] == of_row[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_is_stronger_than_logits_that_are_no_numbers(temperature: float) -> None:
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[-inf, -inf, 3.0, 0.0, -1.0], [nan, 1.0, 3.0, 0.0, -1.0], [-inf, 2.0, -inf, 9.0, nan]])
    params = SamplingParams(temperature=temperature, seed=1)
    assert sample(logits, [masked(params, 1), masked(params, 0), masked(params, 4)])[0] == [1, 0, 4]
    assert sample(logits[2:], [masked(params, 0, 1, 4)])[0] == [1]
    biased = replace(params, logit_bias=((1, -100.0),))
    assert sample(logits[:1], [masked(biased, 0, 1)])[0][0] in (0, 1)


# A seed and a place in the answer, with a uniform number that is less than 4e-8 below 1.
LAST_DRAWS = [(16, 305_229), (144, 271_915)]


@pytest.mark.parametrize("vocab", [1000, 49_152])
@pytest.mark.parametrize(("seed", "position"), LAST_DRAWS)
def test_a_draw_close_to_1_gives_no_token_of_hardly_any_probability(seed: int, position: int, vocab: int) -> None:
    """Sums of float32 weights are off by more than the mass of the last tokens."""
    point = sampling_reference.uniform(seed, position)
    assert 0 < 1 - point < 4e-8
    logits = torch.randn(20, vocab, generator=torch.Generator().manual_seed(3)) * 3
    rows = [row(SamplingParams(temperature=0.5, seed=seed), output=(0,) * position)] * 20
    for row_logits, token_id in zip(logits.double().numpy(), sample(logits, rows)[0], strict=True):
        weights = np.exp((row_logits - row_logits.max()) / 0.5)
        mass_from_here_on = weights[row_logits <= row_logits[token_id]].sum() / weights.sum()
        assert 0.99 * (1 - point) < mass_from_here_on
        assert mass_from_here_on - weights[token_id] / weights.sum() < 1.01 * (1 - point)


@pytest.mark.parametrize("vocab", [7, 49_152])
def test_a_logit_that_is_no_number_is_passed_over(vocab: int) -> None:
    if current in ("torch", "device"):
        pytest.skip("gives such a row its first token")
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(1))
    wrong, excluded = logits.clone(), logits.clone()
    wrong[:, 3], excluded[:, 3] = torch.nan, -torch.inf
    rows = [row(SamplingParams(seed=seed)) for seed in range(100)]
    assert sample(wrong.expand(100, -1), rows)[0] == sample(excluded.expand(100, -1), rows)[0]


def test_huge_logits_have_exact_log_probabilities() -> None:
    logits = torch.tensor([[1e30] * 8, [1e30, -1e30] * 4])
    reports = sample(logits, [row(SamplingParams(logprobs=2))] * 2)[1]
    assert [report.top[0][1] for report in reports if report is not None] == pytest.approx([-math.log(8), -math.log(4)])


@pytest.mark.parametrize("gives_likeliest", [False, True])
def test_rows_of_nan_are_noted_and_have_an_id_of_the_vocabulary_on_the_device(gives_likeliest: bool) -> None:
    logits = LOGITS.repeat(6, 1)
    broken = (1, 2, 5)
    logits[list(broken)] = torch.nan
    greedy, drawn = SamplingParams(), SamplingParams(temperature=1.0, seed=1)
    penalised = SamplingParams(temperature=0.5, seed=2, repetition_penalty=1.2, top_k=3, logprobs=2)
    for kinds in ([greedy], [drawn], [penalised], [greedy, drawn], [drawn, greedy, penalised]):
        rows = [row(kinds[index % len(kinds)]) for index in range(6)]
        likeliest = sampler.likeliest_ids(logits) if gives_likeliest else None
        pending = SAMPLERS[current]().launch(logits, rows, likeliest)
        found = pending.result()
        assert found.nan == broken
        assert all(0 <= token_id < 5 for token_id in pending.token_ids.tolist() + found.token_ids)
        others = [index for index in range(6) if index not in broken]
        wanted = SAMPLERS[current]().launch(LOGITS.repeat(6, 1), rows).result()
        assert [found.token_ids[index] for index in others] == [wanted.token_ids[index] for index in others]
        assert [found.logprobs[index] for index in others] == [wanted.logprobs[index] for index in others]


def test_one_sampler_follows_greedy_batches_that_change() -> None:
    """It keeps the parameters of its last batch. Rows come, go and get masks, and some have logits of NaN."""
    kept, generator = SAMPLERS[current](), np.random.default_rng(5)
    plain, biased, late = (
        SamplingParams(),
        SamplingParams(logit_bias=((7, 2.5), (40, -3.0))),
        SamplingParams(min_tokens=2, stop_token_ids=frozenset({3, 11})),
    )
    even = np.packbits(np.arange(50) % 2 == 0, bitorder="little").tobytes()
    chosen: list[SamplingParams] = [plain]
    num_masked = num_nan = 0
    for step in range(200):
        if step % 4 == 0:
            chosen = [(plain, plain, biased, late)[number] for number in generator.integers(4, size=1 + step % 6)]
        rows, wanted, nan = [], [], []
        logits = torch.from_numpy(generator.standard_normal((len(chosen), 50)).astype(np.float32))
        for index, params in enumerate(chosen):
            output = tuple(range(int(generator.integers(4))))
            mask = even if generator.random() < 0.1 else None
            rows.append(replace(row(params, output=output), mask=mask))
            adjusted = logits[index].numpy().copy()
            for token_id, addend in params.logit_bias:
                adjusted[token_id] += np.float32(addend)
            if len(output) < params.min_tokens:
                adjusted[list(params.stop_token_ids)] = -np.inf
            if mask is not None:
                adjusted[1::2] = -np.inf
            wanted.append(int(adjusted.argmax()))
            if mask is None and generator.random() < 0.05:
                logits[index] = math.nan
                nan.append(index)
        sampled = kept.launch(logits, rows).result()
        num_masked, num_nan = num_masked + sum(each.mask is not None for each in rows), num_nan + len(nan)
        assert sampled.nan == tuple(nan)
        found = zip(sampled.token_ids, wanted, strict=True)
        assert all(one == other for index, (one, other) in enumerate(found) if index not in nan)
        assert all(0 <= token_id < 50 for token_id in sampled.token_ids)
    assert num_masked > 20
    assert num_nan > 10
