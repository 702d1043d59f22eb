"""ModelRunnerBase: everything about running a step that does not depend on the device.

A device overrides `_cache_device_properties`, `load_model`, `profile_run` and `capture_model`; the rest is shared, as
the ModelRunnerBase proposal for vLLM has it, but as a thin class over parts with one job each: input batch, attention
backend, row cache, sampler.
"""

from __future__ import annotations

import logging
import pathlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoder_svc.family import DecoderFamily
from decoder_svc.fetched_rows import FetchedRows
from decoder_svc.request import RequestId
from decoder_svc.runner.attention import (
    AttentionBackend,
    AttentionMetadata,
    BlockMetadata,
    KVCacheSpec,
    forward_context,
)
from decoder_svc.runner.input_batch import BlockInputs, FlatInputs, InputBatch
from decoder_svc.runner.row_cache import RowCache
from decoder_svc.runner.sampler import SampleRow, sample
from decoder_svc.runner.worst_case import NUM_BLOCKS, WorstCase, worst_case_rows, worst_case_step
from decoder_svc.scheduler_output import SampledToken, ScheduledChunk, SchedulerOutput
from lookonce.families.base import Mask

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """What a runner is told."""

    # Folder of the Hugging Face model.
    folder: pathlib.Path
    # None: what the checkpoint says.
    dtype: torch.dtype | None
    # Tokens per KV block.
    block_size: int
    # Threads for tensor work; None: the CPUs of this process.
    num_threads: int | None
    # One chunk per forward pass, so that no token's numbers depend on who else is in the batch.
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Embedded:
    """A step's input embeddings."""

    # [num_tokens, hidden_size].
    tokens: Tensor
    # Of each further feature level, the same shape; only the rows of images count.
    levels: tuple[Tensor, ...]
    # Tokens that an image's row stands for.
    row_indexes: list[int]


class ModelRunnerBase(ABC):
    """Owns the language model, the KV pools and the rows on the device; turns a SchedulerOutput into tokens."""

    device: torch.device
    model: Any
    backend: AttentionBackend

    def __init__(self, config: RunnerConfig, family: DecoderFamily) -> None:
        self.config = config
        self.family = family
        self._cache_device_properties()
        self.load_model()
        has_sliding_group = self.get_kv_cache_spec().window is not None
        self.batch = InputBatch(config.block_size, family.num_position_axes, has_sliding_group=has_sliding_group)
        self.row_cache = RowCache(self.device, self.model.dtype)

    # What a device decides.

    @abstractmethod
    def _cache_device_properties(self) -> None:
        """Sets `device` and whatever the device wants to remember."""

    @abstractmethod
    def load_model(self) -> None:
        """Sets `model` (language half only) and `backend`."""

    @abstractmethod
    def profile_run(self, worst: WorstCase) -> int:
        """Runs the heaviest step once; returns the bytes that are free beside it, for the KV pool among others."""

    @abstractmethod
    def capture_model(self) -> None:
        """Prepares fixed-shape graphs where the device has them."""

    # What all share.

    def get_model(self) -> Any:
        """The language half."""
        return self.model

    def get_kv_cache_spec(self) -> KVCacheSpec:
        """The KV cache that this model needs."""
        text = self.model.config.get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        sliding_layers = _sliding_layers(text)
        return KVCacheSpec(
            num_layers=text.num_hidden_layers,
            num_kv_heads=text.num_key_value_heads,
            head_dim=head_dim,
            dtype=self.model.dtype,
            block_size=self.config.block_size,
            sliding_layers=sliding_layers,
            window=text.sliding_window if sliding_layers else None,
        )

    def initialize_kv_cache(self, num_blocks: int, num_sliding_blocks: int = 0) -> None:
        """Allocates the pools of all layers: of the full group and, where the model has one, of the sliding group."""
        spec = self.get_kv_cache_spec()
        # One block more, which nobody reads: what must not be written to a shared block is written there.
        self.backend.allocate(spec, num_blocks + 1, num_sliding_blocks + 1, self.device)
        self.batch.set_num_blocks(num_blocks, num_sliding_blocks)
        num_bytes = num_blocks * spec.block_bytes + num_sliding_blocks * spec.sliding_block_bytes
        logger.info(
            "KV cache: %d blocks of %d tokens, and %d for layers with a window, %.1f MiB, attention backend %s",
            num_blocks, spec.block_size, num_sliding_blocks, num_bytes / 2**20, self.backend.name,
        )  # fmt: skip

    def _dummy_run(self, worst: WorstCase) -> None:
        """Runs the heaviest step with a pool of its own and forgets it; the KV cache must be initialised afterwards."""
        self.initialize_kv_cache(NUM_BLOCKS, NUM_BLOCKS)
        rows = worst_case_rows(worst)
        for fetched in rows:
            self.put_rows(fetched)
        step = worst_case_step(worst, self.config.block_size, self.get_kv_cache_spec().window)
        self.execute_model(step)
        released = tuple(admitted.request_id for admitted in step.admitted)
        evicted = tuple((fetched.key, fetched.rows) for fetched in rows)
        self.execute_model(SchedulerOutput((), (), released, evicted, ()))

    def put_rows(self, fetched: FetchedRows) -> None:
        """Takes rows that arrived for a key that the scheduler has room for."""
        self.row_cache.put(fetched)

    def execute_model(self, output: SchedulerOutput) -> list[SampledToken]:
        """Runs one step; returns the next token of every request whose chunk reached its last known token."""
        self._update_states(output)
        passes = [(chunk,) for chunk in output.chunks] if self.config.deterministic else [output.chunks]
        return [token for chunks in passes if chunks for token in self._execute_chunks(chunks)]

    def _execute_chunks(self, chunks: tuple[ScheduledChunk, ...]) -> list[SampledToken]:
        inputs = self.batch.flatten(chunks)
        with torch.inference_mode():
            logits = self._forward(inputs, self._embed(inputs, chunks))
            return self._sample(inputs.sampled_ids, logits)

    def _update_states(self, output: SchedulerOutput) -> None:
        """Forgets what left, learns what came, brings block tables up to date."""
        for request_id in output.released:
            self.batch.remove(request_id)
        for key, rows in output.evicted_rows:
            self.row_cache.drop(key, rows)
        for admitted in output.admitted:
            self.batch.add(admitted)
        for chunk in output.chunks:
            self.batch[chunk.request_id].set_blocks(chunk)

    def _embed(self, inputs: FlatInputs, chunks: tuple[ScheduledChunk, ...]) -> Embedded:
        """Token table lookup with the images' rows over their placeholders."""
        table = self.model.get_input_embeddings()
        ids = torch.from_numpy(inputs.token_ids).to(self.device)
        # Placeholder ids may lie outside the table; their rows are overwritten anyway.
        looked_up: Tensor = table(ids.clamp_(max=table.num_embeddings - 1))
        hidden_size = looked_up.shape[1]
        # Text has nothing on the further levels, and no row is read from there.
        embeddings = F.pad(looked_up, (0, self.family.num_levels * hidden_size))
        placed: list[int] = []
        first = 0
        for chunk in chunks:
            stop = chunk.start + chunk.num_tokens
            for item in self.batch[chunk.request_id].images:
                if item.span.offset < stop and item.span.stop > chunk.start:
                    placed += self.row_cache.place(embeddings, first, item, chunk.start, stop)
            first += chunk.num_tokens
        tokens, *levels = embeddings.split(hidden_size, dim=1)
        return Embedded(tokens, tuple(levels), placed)

    def _forward(self, inputs: FlatInputs, embedded: Embedded) -> Tensor:
        """Logits of the sampled positions, `[num_sampled, vocab]`."""
        metadata = AttentionMetadata(
            full=self._on_device(inputs.full),
            sliding=None if inputs.sliding is None else self._on_device(inputs.sliding),
            query_lens=inputs.query_lens,
            kv_lens=inputs.kv_lens,
            mutual_spans=inputs.mutual_spans,
            is_mutual_beyond_window=self.family.mask is Mask.PROMPT,
        )
        positions = torch.from_numpy(inputs.positions).to(self.device)
        arguments = {
            "inputs_embeds": embedded.tokens[None],
            # [1, T] for plain rotary positions, [axes, 1, T] for M-RoPE.
            "position_ids": positions if self.family.num_position_axes == 1 else positions[:, None],
            "attention_mask": None,
            "use_cache": False,
        }
        sampled = torch.from_numpy(inputs.sampled_indexes).to(self.device)
        with forward_context(self.backend, metadata):
            if embedded.levels and embedded.row_indexes:
                return self._forward_with_levels(arguments, embedded, sampled)
            # The wrapper applies what its head has besides weights: scales, soft caps.
            logits: Tensor = self.model(**arguments, logits_to_keep=sampled).logits[0]
        return logits

    def _on_device(self, inputs: BlockInputs) -> BlockMetadata:
        return BlockMetadata(
            slot_mapping=torch.from_numpy(inputs.slot_mapping).to(self.device),
            block_tables=tuple(torch.from_numpy(table).to(self.device) for table in inputs.block_tables),
            first_keys=inputs.first_tokens,
        )

    def _forward_with_levels(self, arguments: dict[str, Any], embedded: Embedded, sampled: Tensor) -> Tensor:
        """The same where features of earlier tower layers join the first layers' hidden states (deepstack)."""
        has_row = torch.zeros(1, len(embedded.tokens), dtype=torch.bool, device=self.device)
        rows = sorted(embedded.row_indexes)
        has_row[0, rows] = True
        output = self.model.model.language_model(
            **arguments,
            visual_pos_masks=has_row,
            deepstack_visual_embeds=[level[rows] for level in embedded.levels],
        )
        logits: Tensor = self.model.lm_head(output.last_hidden_state[0, sampled])
        return logits

    def _sample(self, request_ids: tuple[RequestId, ...], logits: Tensor) -> list[SampledToken]:
        if not request_ids:
            return []
        rows = [self.batch[request_id] for request_id in request_ids]
        token_ids, logprobs = sample(
            logits, [SampleRow(row.params, row.token_ids, row.num_prompt_tokens) for row in rows]
        )
        for row, token_id in zip(rows, token_ids, strict=True):
            row.append_token(token_id)
        return [SampledToken(*result) for result in zip(request_ids, token_ids, logprobs, strict=True)]


def _sliding_layers(text: Any) -> frozenset[int]:
    """Layers that the text configuration gives a window while others see everything.

    Where all have one, or none, all are in the full group: an all-window model keeps every token, and masks.
    """
    types = getattr(text, "layer_types", None) or []
    sliding = frozenset(layer for layer, kind in enumerate(types) if kind == "sliding_attention")
    return sliding if len(sliding) < text.num_hidden_layers and getattr(text, "sliding_window", None) else frozenset()
