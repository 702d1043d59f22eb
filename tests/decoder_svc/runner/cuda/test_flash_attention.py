"""Calls of the flash-attn backend, against functions that follow the package's documentation.

The package itself runs on CUDA only; `make bench-gpu` compares it with the other backends there.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from decoder_svc.runner.attention import LayerOptions
from decoder_svc.runner.cuda.flash_attention import FlashBackend, FlashFunctions
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from decoder_svc.scheduling.prompt import Span
from decoder_svc.scheduling.window import Window
from tests.decoder_svc.runner.attention_reference import Chunk
from tests.decoder_svc.runner.attention_step import LAYER, Sizes, Step, StepCase, any_step
from tests.decoder_svc.runner.tensor_backend import TensorBackend

CALLS: list[str] = []


def attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: tuple[int, int], softcap: float
) -> Tensor:
    """Attends one sequence's `[tokens, heads, dim]` over `[keys, kv_heads, dim]`; the mask ends at the lower right."""
    num_groups = query.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(num_groups, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    behind = torch.arange(len(query))[:, None] + len(keys) - len(query) - torch.arange(len(keys))
    left, right = window
    assert right == (0 if left >= 0 else -1)
    seen = (behind >= 0) & (behind <= left if left >= 0 else True)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
    block_table: Tensor,
) -> Tensor:  # fmt: skip
    CALLS.append("varlen")
    assert causal
    assert {tensor.dtype for tensor in (cu_seqlens_q, cu_seqlens_k, block_table)} == {torch.int32}
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) <= max_seqlen_k
    outputs = []
    for index, table in enumerate(block_table):
        query = q[cu_seqlens_q[index] : cu_seqlens_q[index + 1]]
        num_keys = int(cu_seqlens_k[index + 1] - cu_seqlens_k[index])
        keys, values = (pool[table].flatten(0, 1)[:num_keys] for pool in (k, v))
        outputs.append(attend(query, keys, values, softmax_scale, window_size, softcap))
    return torch.cat(outputs)


def with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, softmax_scale: float, causal: bool,
    window_size: tuple[int, int], softcap: float, block_table: Tensor,
) -> Tensor:  # fmt: skip
    CALLS.append("with_kvcache")
    assert causal
    assert q.shape[1] == 1
    assert cache_seqlens.dtype is torch.int32
    outputs = []
    for query, table, num_keys in zip(q, block_table, cache_seqlens.tolist(), strict=True):
        keys, values = (pool[table].flatten(0, 1)[:num_keys] for pool in (k_cache, v_cache))
        outputs.append(attend(query, keys, values, softmax_scale, window_size, softcap))
    return torch.stack(outputs)


FUNCTIONS = FlashFunctions(varlen, with_kvcache)


def flash() -> FlashBackend:
    return FlashBackend(FUNCTIONS, TensorBackend())


@settings(max_examples=100)
@any_step(torch.float32)
def test_any_step_equals_the_reference(case: StepCase) -> None:
    case.check(flash)


def test_single_tokens_use_the_decode_function_and_spans_and_chunks_of_a_sequence_the_fallback() -> None:
    decode, chunk = Chunk(9, 8, 8, 9), Chunk(9, 4, 4, 9)
    for chunks, window, wanted in (
        ([decode, decode], Window(3), ["with_kvcache"]),
        ([decode, chunk], None, ["varlen"]),
        ([decode, Chunk(9, 4, 4, 9, (Span(5, 3),))], None, []),
        ([decode, decode], Window(3, is_chunked=True), []),
    ):
        CALLS.clear()
        Step(chunks, Sizes(), 0, torch.float32, backend=flash).run(LayerOptions(1.0, window))
        assert wanted == CALLS


def test_the_fallback_backend_attends_over_the_same_pools() -> None:
    fallback = TensorBackend()
    backend = FlashBackend(FUNCTIONS, fallback)
    pools = backend.allocate(KVCacheSpec(2, 2, 4, torch.float32, 4), 3, 3, torch.device("cpu"))
    assert fallback._pools[LAYER][0].data_ptr() == pools[LAYER][0].data_ptr()


@pytest.mark.parametrize(
    ("spans", "window"), [((Span(5, 3),), None), ((), Window(3, is_chunked=True))], ids=["spans", "chunks"]
)
def test_what_the_package_cannot_mask_is_an_error_without_a_fallback(
    spans: tuple[Span, ...], window: Window | None
) -> None:
    step = Step([Chunk(9, 4, 4, 9, spans)], Sizes(), 0, torch.float32, backend=lambda: FlashBackend(FUNCTIONS, None))
    with pytest.raises(AssertionError, match="mutual spans and chunks need a fallback"):
        step.run(LayerOptions(1.0, window))
