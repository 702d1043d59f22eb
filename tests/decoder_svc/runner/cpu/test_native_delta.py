"""Gated delta nets by our kernel: transformers' recurrent form, from any state, with any division of tokens."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder_svc.runner.cpu.attention import SOURCES
from decoder_svc.runner.cpu.native_delta import NativeDeltaStep
from decoder_svc.runner.state_step import state_arrays
from decoder_svc.scheduling.scheduler_output import StateUse
from lookonce.model.kernels.native_library import load_library
from tests.decoder_svc.runner.cpu.loaded_runner import load
from tests.decoder_svc.runner.delta_states import (
    NUM_SLOTS,
    NUM_SNAPSHOTS,
    POOL,
    SIZES,
    Sizes,
    check_cuts,
    check_recurrent_form,
)

pytestmark = pytest.mark.usefixtures("library")


def kernel(num_threads: int) -> NativeDeltaStep:
    return NativeDeltaStep(load_library(SOURCES), num_threads)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 10_000), num_threads=st.integers(1, 3))
def test_it_computes_transformers_recurrent_form_behind_a_convolution(
    sizes: Sizes, seed: int, num_threads: int
) -> None:
    check_recurrent_form(kernel(num_threads), sizes, seed)


@settings(max_examples=30, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 10_000), dtype=st.sampled_from((torch.float32, torch.bfloat16)))
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(sizes: Sizes, seed: int, dtype: torch.dtype) -> None:
    check_cuts((kernel(2), kernel(3)), sizes, seed, dtype)


@pytest.mark.parametrize(
    "use",
    [
        StateUse(NUM_SLOTS, None, ()),
        StateUse(-1, None, ()),
        StateUse(0, NUM_SNAPSHOTS, ()),
        StateUse(0, None, ((3, NUM_SNAPSHOTS),)),
    ],
)
def test_states_that_the_pool_does_not_have_are_refused(use: StateUse) -> None:
    with pytest.raises(IndexError, match="is outside of PoolSizes"):
        state_arrays([use], [3], [3], POOL)


def test_a_kernel_with_other_results_is_not_used(
    family_folder: Callable[[str], pathlib.Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = family_folder("qwen3_5")
    usual = load(folder, torch.float32).recurrent
    assert usual is not None
    assert usual.have_kernels
    right = NativeDeltaStep.__call__
    monkeypatch.setattr(NativeDeltaStep, "__call__", lambda *arguments: right(*arguments) * 1.01)
    with caplog.at_level(logging.WARNING):
        recurrent = load(folder, torch.float32).recurrent
    assert recurrent is not None
    assert not recurrent.have_kernels
    assert "recurrent layers: operators of PyTorch: they compute other numbers on this device" in caplog.text


def test_what_the_kernel_does_not_know_is_left_to_pytorch() -> None:
    delta = kernel(1)
    assert delta.can_compute(8, 48, torch.float32)
    assert delta.can_compute(8, 48, torch.bfloat16)
    assert not delta.can_compute(8, 24, torch.float32)
    assert not delta.can_compute(8, 48, torch.float16)
