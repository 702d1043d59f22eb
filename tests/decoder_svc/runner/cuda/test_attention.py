"""The choice of a CUDA device's attention backend, and its logged reasons. Trials run on the CPU here."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from decoder_svc.runner.attention import LayerOptions, SdpaBackend
from decoder_svc.runner.cuda import attention as cuda_attention
from decoder_svc.runner.cuda import flash_attention
from decoder_svc.runner.cuda.attention import AttentionNeeds
from decoder_svc.runner.cuda.flash_attention import FlashBackend, FlashFunctions
from decoder_svc.runner.paged_step import PagedBlocks, PagedStep
from tests.decoder_svc.runner.cuda.fake_cuda import FakeTriton
from tests.decoder_svc.runner.cuda.test_flash_attention import FUNCTIONS

TRITON_MODULE = "decoder_svc.runner.cuda.triton_attention"
NEEDS = AttentionNeeds(
    head_counts=(4,),
    num_kv_heads=2,
    head_dim=16,
    dtype=torch.bfloat16,
    block_size=256,
    has_mutual_spans=False,
    has_chunks=False,
    device=torch.device("cpu"),
    capability=(9, 0),
    num_processors=132,
    shared_bytes=227 << 10,
)


class WrongTriton(FakeTriton):
    """A kernel that compiles but ignores the scale."""

    def attend_paged(
        self, layer: int, query: torch.Tensor, group: PagedBlocks, step: PagedStep, options: LayerOptions
    ) -> torch.Tensor:
        options = replace(options, scale=1.0)
        return super().attend_paged(layer, query, group, step, options)


class WrongGroups(FakeTriton):
    """A kernel that is wrong where three query heads share a head of keys."""

    def attend_paged(
        self, layer: int, query: torch.Tensor, group: PagedBlocks, step: PagedStep, options: LayerOptions
    ) -> torch.Tensor:
        attended = super().attend_paged(layer, query, group, step, options)
        return -attended if query.shape[1] == 6 else attended


class BrokenTriton(FakeTriton):
    """A kernel that fails to compile."""

    def attend_paged(self, *_arguments: object, **_options: object) -> torch.Tensor:
        raise RuntimeError("ptxas: /opt/somewhere: too many registers")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that makes the two packages look installed or not."""

    def installed(*, flash: bool, triton: type[FakeTriton] | None) -> None:
        def functions() -> FlashFunctions:
            if flash:
                return FUNCTIONS
            raise ImportError("No module named 'flash_attn'")

        monkeypatch.setattr(cuda_attention, "load_flash_functions", functions)
        module = None if triton is None else types.SimpleNamespace(TritonBackend=triton)
        # None in sys.modules makes the import fail, as if Triton were not installed.
        monkeypatch.setitem(sys.modules, TRITON_MODULE, module)

    return installed


def chosen(needs: AttentionNeeds, caplog: pytest.LogCaptureFixture) -> tuple[str, str]:
    """Returns the backend's name and the log."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        backend = cuda_attention.cuda_attention(needs)
    return backend.name, caplog.text


def test_flash_attn_is_chosen_if_it_supports_the_model(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    install(flash=True, triton=FakeTriton)
    assert chosen(NEEDS, caplog)[0] == "flash-attn"
    with_spans = cuda_attention.cuda_attention(replace(NEEDS, has_mutual_spans=True))
    assert isinstance(with_spans, FlashBackend)
    assert isinstance(with_spans._fallback, FakeTriton)


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (replace(NEEDS, block_size=16), "flash-attn needs a block_size that is a multiple of 256, not 16"),
        (replace(NEEDS, dtype=torch.float32), "flash-attn does not compute in torch.float32"),
        (replace(NEEDS, head_dim=272), "flash-attn does not support a head size of 272"),
        (replace(NEEDS, head_dim=20), "flash-attn does not support a head size of 20"),
        (replace(NEEDS, capability=(7, 5)), "flash-attn does not run on compute capability (7, 5)"),
        (replace(NEEDS, is_rounded=True), "flash-attn does not read keys and values of 8 bits"),
    ],
)
def test_our_kernel_is_chosen_with_a_logged_reason_if_flash_attn_does_not_fit(
    needs: AttentionNeeds, reason: str, install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    install(flash=True, triton=FakeTriton)
    name, text = chosen(needs, caplog)
    assert name == "triton"
    assert reason in text


def test_our_kernel_is_chosen_without_flash_attn(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    install(flash=False, triton=FakeTriton)
    name, text = chosen(NEEDS, caplog)
    assert name == "triton"
    assert "flash-attn cannot be imported" in text
    backend = cuda_attention.cuda_attention(NEEDS)
    assert isinstance(backend, FakeTriton)
    assert backend.num_processors == 132


def test_a_kernel_is_tried_with_each_number_of_query_heads(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    install(flash=False, triton=WrongGroups)
    assert chosen(replace(NEEDS, head_counts=(4, 8)), caplog)[0] == "triton"
    name, text = chosen(replace(NEEDS, head_counts=(4, 6)), caplog)
    assert name == "sdpa"
    assert "triton differs from PyTorch" in text


def test_pytorch_is_chosen_without_both(install: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    install(flash=False, triton=None)
    assert type(cuda_attention.cuda_attention(NEEDS)) is SdpaBackend
    name, text = chosen(NEEDS, caplog)
    assert name == "sdpa"
    assert "Triton cannot be imported" in text


def test_our_kernel_is_chosen_for_latents_of_a_size_that_it_takes(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    install(flash=True, triton=FakeTriton)
    kimi = replace(NEEDS, num_kv_heads=1, head_dim=576, value_dim=512)
    assert chosen(kimi, caplog)[0] == "triton"
    for needs, reason in (
        (replace(kimi, head_dim=1040, value_dim=1024), "our kernel takes heads of at most 512 elements, not 1024"),
        (replace(kimi, head_dim=640), "our kernel takes at most 64 elements beside a latent, not 128"),
        (replace(kimi, value_dim=None), "our kernel takes heads of at most 512 elements, not 576"),
    ):
        name, text = chosen(needs, caplog)
        assert name == "sdpa"
        assert reason in text


def test_flash_attn_is_not_chosen_for_spans_without_our_kernel(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    install(flash=True, triton=None)
    assert chosen(NEEDS, caplog)[0] == "flash-attn"
    assert chosen(replace(NEEDS, has_mutual_spans=True), caplog)[0] == "sdpa"


def test_a_kernel_that_does_not_compile_here_is_not_used(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    install(flash=False, triton=BrokenTriton)
    name, text = chosen(NEEDS, caplog)
    assert name == "sdpa"
    assert "triton fails on this device (RuntimeError)" in text


def test_a_kernel_with_wrong_results_is_not_used(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    install(flash=False, triton=WrongTriton)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name, text = chosen(replace(NEEDS, dtype=dtype), caplog)
        assert name == "sdpa"
        assert "triton differs from PyTorch by" in text


def test_the_package_is_imported_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.SimpleNamespace(flash_attn_varlen_func=len, flash_attn_with_kvcache=max)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    assert flash_attention.load_flash_functions() == FlashFunctions(len, max)
