"""Replaces a loaded language model by a fused stack, if the two agree on a few tokens."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
from torch import Tensor

from decoder_svc.runner.attention import AttentionMetadata, LayerOptions, forward_context
from decoder_svc.runner.cuda.paged_backend import PagedBackend
from decoder_svc.runner.cuda.quantized_layers import wrong_layer_reason
from decoder_svc.runner.input_batch import InputBatch
from decoder_svc.runner.kv_cache_spec import KVCacheSpec
from decoder_svc.runner.step_metadata import step_metadata
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.sampling_params import SamplingParams
from decoder_svc.scheduling.scheduler_output import AdmittedRequest, ScheduledChunk, SlidingTable
from lookonce.model.half_model import text_child

logger = logging.getLogger(__name__)

_NUM_TOKENS = 21
# Tokens of the first step; the others follow in steps of one token.
_NUM_PROMPT_TOKENS = 18
_SEED = 7
# Largest accepted difference of a hidden state, relative to the largest hidden state.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class _RecordingBackend:
    """Passes calls on to a backend and notes the options of each layer."""

    def __init__(self, backend: PagedBackend) -> None:
        self._backend = backend
        self.options: dict[int, LayerOptions] = {}

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, options: LayerOptions
    ) -> Tensor:
        """Implements AttentionBackend.forward, and notes the options of the call."""
        self.options[layer] = options
        return self._backend.forward(layer, query, key, value, metadata, options)


def install_fused_stack(
    model: Any, backend: PagedBackend, spec: KVCacheSpec, num_position_axes: int, device: torch.device
) -> None:
    """Changes the model in place, or logs why its layers stay as they are. Reallocates the backend's pools."""
    reason = _install(model, backend, spec, num_position_axes, device)
    if reason is not None:
        logger.info("language model: transformers' modules: %s", reason)


def _install(
    model: Any, backend: PagedBackend, spec: KVCacheSpec, num_position_axes: int, device: torch.device
) -> str | None:
    try:
        fused_stack = importlib.import_module("decoder_svc.runner.cuda.fused_stack")
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    name = text_child(model)
    text_model = getattr(model.model, name)
    reason: str | None = fused_stack.unfusable_reason(text_model)
    if reason is not None:
        return reason
    recording = _RecordingBackend(backend)
    try:
        wanted = _hidden_states(text_model, recording, backend, spec, num_position_axes, device)
        options = [recording.options[layer] for layer in sorted(recording.options)]
        stack = fused_stack.FusedStack(text_model, backend, options)
        # Merged layers have shapes of their own.
        if (reason := wrong_layer_reason(stack)) is not None:
            return f"a layer that was merged is wrong: {reason}"
        found = _hidden_states(stack, backend, backend, spec, num_position_axes, device)
    except Exception as error:  # compilers and drivers raise many types
        logger.debug("the fused stack failed its trial", exc_info=True)
        return f"the fused stack fails on this device ({type(error).__name__})"
    difference = float((found - wanted).abs().max() / wanted.abs().max())
    # Written with `not` so that NaN fails.
    if not difference <= _TOLERANCES[spec.dtype]:
        return f"the fused stack differs by {difference:.2g} of the largest"
    setattr(model.model, name, stack)
    logger.info("language model: fused stack, within %.2g of transformers' modules", difference)
    return None


def _hidden_states(
    text_model: Any,
    called: Any,
    backend: PagedBackend,
    spec: KVCacheSpec,
    num_position_axes: int,
    device: torch.device,
) -> Tensor:
    """Returns the last hidden states of fixed random tokens in a few steps, `[_NUM_TOKENS, hidden_size]`, float32.

    `called` is the backend that layers call; it uses `backend`.
    """
    num_blocks = -(-_NUM_TOKENS // spec.block_size)
    backend.allocate(spec, num_blocks + 1, num_blocks + 1, device)
    generator = torch.Generator().manual_seed(_SEED)
    hidden_size = text_model.config.hidden_size
    embeddings = torch.randn(1, _NUM_TOKENS, hidden_size, generator=generator).to(device, spec.dtype)
    has_sliding_group = spec.window is not None
    batch = InputBatch(spec.block_size, num_position_axes, has_sliding_group=has_sliding_group)
    batch.set_num_blocks(num_blocks, num_blocks)
    params = SamplingParams(max_tokens=1)
    batch.add(AdmittedRequest(_NAME, (0,) * _NUM_TOKENS, _NUM_TOKENS, (), None, (), params))
    table = tuple(range(num_blocks))
    stops = (_NUM_PROMPT_TOKENS, *range(_NUM_PROMPT_TOKENS + 1, _NUM_TOKENS + 1))
    found = []
    for start, stop in zip((0, *stops[:-1]), stops, strict=True):
        sliding = SlidingTable(0, 0, table) if has_sliding_group else None
        chunk = ScheduledChunk(_NAME, start, stop - start, start, 0, table, False, sliding)
        batch[_NAME].set_blocks(chunk)
        metadata = step_metadata(
            batch.flatten([chunk]), lambda host: host.to(device), reads_tensors=True, is_mutual_beyond_window=False
        )
        # Different positions on each axis, so that mixed-up axes show.
        positions = torch.arange(start, stop) * torch.arange(1, num_position_axes + 1)[:, None]
        with torch.inference_mode(), forward_context(called, metadata):
            output = text_model(
                inputs_embeds=embeddings[:, start:stop],
                position_ids=(positions if num_position_axes == 1 else positions[:, None]).to(device),
                attention_mask=None,
                use_cache=False,
            )
        found.append(output.last_hidden_state[0].float())
    return torch.cat(found)


_NAME = RequestId("trial")
