"""Mamba2 layers on the sequences of a step: the recurrence in float64, however sequences are divided and batched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decoder_svc.runner.cpu.attention import SOURCES
from decoder_svc.runner.cpu.native_mamba2 import NativeScanStep
from decoder_svc.runner.recurrent.mamba2 import Mamba2, ScanStep
from decoder_svc.scheduling.scheduler_output import StateUse
from lookonce.model.kernels.native_library import load_library
from tests.decoder_svc.runner.scan_states import (
    HIDDEN_SIZE,
    SIZES,
    Sizes,
    check_cuts,
    check_divisions,
    check_module,
    check_small_time_steps,
    check_snapshots,
    computed,
    layer_of,
    module,
)


@pytest.fixture(params=["operators", "native"])
def kernel(request: pytest.FixtureRequest) -> ScanStep | None:
    """Returns our kernel, or None for PyTorch's operators."""
    if request.param == "operators":
        return None
    request.getfixturevalue("library")
    return native(2)


def native(num_threads: int) -> NativeScanStep:
    return NativeScanStep(load_library(SOURCES), num_threads)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=SIZES, seed=st.integers(0, 10_000))
def test_any_division_gives_the_recurrence_of_whole_sequences(kernel: ScanStep | None, sizes: Sizes, seed: int) -> None:
    check_divisions(kernel, sizes, seed)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=SIZES, seed=st.integers(0, 10_000), dtype=st.sampled_from((torch.float32, torch.bfloat16)))
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(
    library: None, sizes: Sizes, seed: int, dtype: torch.dtype
) -> None:
    check_cuts((native(2), native(3)), sizes, seed, dtype)


@pytest.mark.parametrize("seed", range(8))
def test_a_sequence_that_begins_with_a_snapshot_continues_the_other(kernel: ScanStep | None, seed: int) -> None:
    check_snapshots(kernel, seed)


@pytest.mark.parametrize("seed", range(3))
def test_it_computes_transformers_module_where_no_limit_is_reached(kernel: ScanStep | None, seed: int) -> None:
    check_module(kernel, seed)


def test_time_steps_below_the_limit_are_not_clamped_in_prompts_either(kernel: ScanStep | None) -> None:
    check_small_time_steps(kernel)


@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_differs_from_the_operators_by_rounding_alone_in_bfloat16(library: None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mixer = module(Sizes(has_bias=seed % 2 == 1), torch.bfloat16)
    layers = [layer_of(mixer, each, torch.bfloat16) for each in (None, native(2))]
    steps = [
        [(StateUse(0, None, ((2, 1),)), 0, 5), (StateUse(3, None, ()), 0, 1)],
        [(StateUse(3, None, ()), 1, 1), (StateUse(1, 1, ()), 2, 4), (StateUse(0, None, ()), 5, 3)],
    ]
    for step in steps:
        parts = [
            (use, start, torch.randn(length, HIDDEN_SIZE, generator=generator).to(torch.bfloat16))
            for use, start, length in step
        ]
        expected, found = (torch.cat(computed(layer, parts)) for layer in layers)
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)
        assert torch.equal(layers[0].pool.windows, layers[1].pool.windows)
        torch.testing.assert_close(layers[0].pool.matrices, layers[1].pool.matrices, rtol=1e-5, atol=1e-5)


def test_what_the_kernel_does_not_know_is_left_to_operators(library: None) -> None:
    kernel = native(1)
    assert kernel.can_compute(48, 7, 4, torch.bfloat16)
    assert not kernel.can_compute(40, 16, 4, torch.float32)
    assert not kernel.can_compute(48, 16, 4, torch.float16)
    mixer = module(Sizes())
    mixer.activation = "gelu"
    assert not Mamba2(mixer, torch.float32, kernel).has_kernel
