"""Keys and values of 8 bits in Triton's interpreter, against loops over rounded numbers."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from benchmarks import gpu_checks
from decoder_svc.runner.attention import AttentionMetadata, LayerOptions, SdpaBackend
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from decoder_svc.scheduling.window import Window
from tests.decoder_svc.runner.attention_reference import Chunk
from tests.decoder_svc.runner.attention_step import LAYER, Sizes, Step, StepCase, any_step, check_a_wrong_number
from tests.decoder_svc.runner.cuda.interpreted_triton import FEW, SOME, TritonBackend
from tests.decoder_svc.runner.rounded_numbers import check_rounded, codes_of, scales_of


class Rounded(TritonBackend):
    """The kernel with rounded pools, which are filled from pools of plain numbers."""

    def __init__(self, num_processors: int = FEW) -> None:
        super().__init__(num_processors)
        self._plain: list[tuple[Tensor, Tensor]] = []

    def allocate(
        self, spec: KVCacheSpec, num_blocks: int, num_sliding_blocks: int, device: torch.device
    ) -> list[tuple[Tensor, Tensor]]:
        super().allocate(replace(spec, is_rounded=True), num_blocks, num_sliding_blocks, device)
        self._plain = SdpaBackend().allocate(spec, num_blocks, num_sliding_blocks, device)
        return self._plain

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, options: LayerOptions
    ) -> Tensor:
        pools = self.pools_of(layer)
        own = ((pools.keys, pools.key_scales), (pools.values, pools.value_scales))
        for plain, (codes, scales) in zip(self._plain[layer], own, strict=True):
            codes.copy_(codes_of(plain))
            scales.copy_(scales_of(plain)[..., 0])
        return super().forward(layer, query, key, value, metadata, options)


@settings(max_examples=30)
@any_step(torch.float32, max_chunks=3)
def test_any_step_equals_the_reference_over_rounded_numbers(case: StepCase) -> None:
    window = case.options.window if case.has_sliding_group else None
    step = Step(case.chunks, case.sizes, case.seed, case.dtype, window, Rounded)
    check_rounded(step, case.options, is_mutual_beyond_window=case.is_mutual_beyond_window)


def test_divided_keys_give_the_reference_results() -> None:
    chunks = [Chunk(stop, stop - 1, stop - 1, stop) for stop in (1, 400, 130)]
    for dtype in (torch.float32, torch.float16):
        backend = functools.partial(Rounded, SOME)
        check_rounded(Step(chunks, Sizes(16, 2, 2, 32), 3, dtype, backend=backend), LayerOptions(0.2))


def test_a_number_that_is_none_stays_in_its_sequence() -> None:
    chunks = [Chunk(40, 39, 39, 40), Chunk(5, 4, 4, 5), Chunk(20, 0, 0, 20)]
    step, clean = (Step(chunks, Sizes(16, 2, 2, 16), 3, torch.float32, backend=Rounded) for _ in range(2))
    for pool in step.pools[LAYER]:
        pool[step.tables[0][1], 3, 0, 7] = torch.nan
    outputs, wanted = step.run(LayerOptions(0.2)), clean.run(LayerOptions(0.2))
    assert outputs[0][:, :2].isnan().all(), "heads that share the key head"
    assert torch.equal(outputs[0][:, 2:], wanted[0][:, 2:])
    for output, want in zip(outputs[1:], wanted[1:], strict=True):
        assert torch.equal(output, want)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_token_that_is_no_number_reaches_the_tokens_that_see_it_and_no_others(wrong: float, part: str) -> None:
    check_a_wrong_number(Rounded, Sizes(16, 2, 2, 16), torch.float32, part, wrong, Window(5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_numbers_that_rounding_keeps_give_the_results_of_plain_ones(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`benchmarks.gpu` makes the same check on a GPU. The interpreter has no bfloat16."""
    spec = KVCacheSpec(num_layers=1, num_kv_heads=2, head_dim=40, dtype=dtype, block_size=16)
    monkeypatch.setattr(gpu_checks, "_spec", lambda: spec)
    monkeypatch.setattr(gpu_checks, "_NUM_HEADS", 8)
    trials = {"decode": [(20, 1)] * 2, "long decode": [(700, 1)], "chunks": [(30, 5), (0, 20), (60, 1)]}
    monkeypatch.setattr(gpu_checks, "TRIALS", trials)
    checks = gpu_checks.rounded_agrees(functools.partial(TritonBackend, SOME), torch.device("cpu"))
    assert all(check.passed for check in checks), checks
    monkeypatch.setattr(gpu_checks, "CODE", 1 / 32)
    checks = gpu_checks.rounded_agrees(functools.partial(TritonBackend, SOME), torch.device("cpu"))
    assert not any(check.passed for check in checks), checks
