"""A synthetic step of one attention layer without a window, to check or time any backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decoder_svc.runner.attention import AttentionBackend, LayerOptions
from decoder_svc.runner.input_batch import InputBatch
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from decoder_svc.runner.step_metadata import step_metadata
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import AdmittedRequest, ScheduledChunk

# Difference of neighbouring codes in keys and values that rounding to 8 bits does not change.
CODE = 1 / 64


class AttentionTrial:
    """A step with random queries, keys and values, the same for every backend."""

    def __init__(
        self,
        spec: KVCacheSpec,
        num_heads: int,
        chunks: Sequence[tuple[int, int]],
        device: torch.device,
        *,
        has_codes: bool = False,
    ) -> None:
        """`spec` has one layer and no window. `chunks` lists (cached tokens, new tokens) of each sequence.

        With `has_codes`, keys and values are multiples of 1/64 that rounding to 8 bits does not change.
        """
        self._spec = spec
        self._device = device
        self._generator = torch.Generator().manual_seed(0)
        batch = InputBatch(spec.block_size, 1, has_sliding_group=False)
        scheduled, num_blocks = [], 0
        for index, (num_cached, num_new) in enumerate(chunks):
            name, num_tokens = RequestId(str(index)), num_cached + num_new
            table = tuple(range(num_blocks, num_blocks + -(-num_tokens // spec.block_size)))
            num_blocks += len(table)
            params = SamplingParams(max_tokens=1)
            batch.add(AdmittedRequest(name, (0,) * num_tokens, num_tokens, (), None, (), params))
            scheduled.append(ScheduledChunk(name, num_cached, num_new, num_cached, 0, table, False))
            batch[name].set_blocks(scheduled[-1])
        batch.set_num_blocks(num_blocks, 0)
        self._flat = batch.flatten(scheduled)
        self._num_blocks = num_blocks
        num_tokens = sum(num_new for _, num_new in chunks)
        self._query = self._noise(num_tokens, num_heads, spec.head_dim)
        draw = self._codes if has_codes else self._noise
        self._key = draw(num_tokens, spec.num_kv_heads, spec.head_dim)
        self._value = draw(num_tokens, spec.num_kv_heads, spec.head_dim)
        pool = (num_blocks + 1, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self._contents = [draw(*pool) for _ in range(2)]

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._device, self._spec.dtype)

    def _codes(self, *shape: int) -> Tensor:
        codes = torch.randint(-127, 128, shape, generator=self._generator)
        # The largest code of each head, so that its scale is 1/64.
        codes[..., 0] = 127
        return (codes * CODE).to(self._device, self._spec.dtype)

    def prepared(self, backend: AttentionBackend, *, has_contents: bool = True) -> Callable[[], Tensor]:
        """Allocates the backend's pools; returns a function that computes the step, `[num_tokens, heads, head_dim]`.

        Pools are filled if `has_contents`; their shape must then be `[blocks, block_size, kv_heads, head_dim]`. Empty
        ones take the same time. Pools of 8 bits get the codes of `has_codes`, whose scales the caller must fill.
        """
        pools = backend.allocate(self._spec, self._num_blocks + 1, 1, self._device)[0]
        if has_contents:
            for pool, content in zip(pools, self._contents, strict=True):
                pool.copy_(content / CODE if pool.dtype == torch.int8 else content)
        metadata = step_metadata(
            self._flat,
            lambda host: host.to(self._device),
            reads_tensors=backend.reads_tensors,
            is_mutual_beyond_window=False,
        )
        options = LayerOptions(self._spec.head_dim**-0.5)
        return lambda: backend.forward(0, self._query, self._key, self._value, metadata, options)
