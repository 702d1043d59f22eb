"""ModelRunnerBase: everything about running a step that does not depend on the device.

A device overrides `_cache_device_properties`, `load_model`, `profile_run` and `capture_model`; the rest is shared, as
the ModelRunnerBase proposal for vLLM has it, but as a thin class over parts with one job each: input batch, attention
backend, row cache, graph table, sampler.
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

from decoder_svc.prompt.family import DecoderFamily
from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.runner.attention import (
    AttentionBackend,
    AttentionMetadata,
    KVCacheSpec,
    forward_context,
)
from decoder_svc.runner.graph_table import DecodeInputs, GraphTable, PoolShape, Record, StepShape
from decoder_svc.runner.host_transfer import HostTransfer
from decoder_svc.runner.input_batch import FlatInputs, InputBatch
from decoder_svc.runner.paged_step import PagedStep
from decoder_svc.runner.row_cache import RowCache
from decoder_svc.runner.sampler import SampleRow, sample
from decoder_svc.runner.step_metadata import decode_metadata, step_metadata
from decoder_svc.runner.worst_case import NUM_BLOCKS, WorstCase, worst_case_rows, worst_case_step
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.scheduler_output import SampledToken, ScheduledChunk, SchedulerOutput
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
    # No token's numbers depend on who else is in the batch: one chunk per forward pass where they would.
    deterministic: bool = False
    # Requests in the running batch: graphs are recorded for so many, on devices that have graphs.
    max_num_seqs: int = 64
    # Whether they are.
    use_graphs: bool = True


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """A step's numbers on the device."""

    flat: FlatInputs
    # Rotary positions, [num_axes, num_tokens].
    positions: Tensor
    metadata: AttentionMetadata
    # Tokens whose logits are wanted, [num_sampled].
    sampled_indexes: Tensor


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
    # How numbers and rows get to the device; plain copies where the device says nothing else.
    transfer: HostTransfer
    # Tokens of the steps that are recorded as graphs, ascending; a step is padded to the next of them.
    tokenwise_graph_batch_sizes: tuple[int, ...] = ()
    # Whether no bit of a token's logits depends on who else is in a step, as the model was loaded.
    is_batch_invariant: bool = False
    # False: a graph is a whole forward pass of single tokens, attention included.
    use_piecewise_graph: bool = False

    def __init__(self, config: RunnerConfig, family: DecoderFamily) -> None:
        self.config = config
        self.family = family
        self._cache_device_properties()
        if not hasattr(self, "transfer"):
            self.transfer = HostTransfer(self.device)
        self.load_model()
        # What `capture_model` recorded over the present KV cache.
        self.graphs: GraphTable | None = None
        has_sliding_group = self.get_kv_cache_spec().window is not None
        self.batch = InputBatch(config.block_size, family.num_position_axes, has_sliding_group=has_sliding_group)
        self.row_cache = RowCache(self.transfer, self.model.dtype)

    # What a device decides.

    @abstractmethod
    def _cache_device_properties(self) -> None:
        """Sets `device` and whatever the device wants to remember; `transfer` and graph sizes, where it has its own."""

    @abstractmethod
    def load_model(self) -> None:
        """Sets `model` (language half only) and `backend`."""

    @abstractmethod
    def profile_run(self, worst: WorstCase) -> int:
        """Runs the heaviest step once; returns the bytes that are free beside it, for the KV pool among others."""

    @abstractmethod
    def capture_model(self) -> None:
        """Calls `_capture_graphs` where the device has graphs; the KV cache is there."""

    # What all share.

    def get_model(self) -> Any:
        """The language half."""
        return self.model

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        text = self.model.config.get_text_config()
        return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)

    def get_kv_cache_spec(self) -> KVCacheSpec:
        """The KV cache that this model needs."""
        text = self.model.config.get_text_config()
        sliding_layers = _sliding_layers(text)
        return KVCacheSpec(
            num_layers=text.num_hidden_layers,
            num_kv_heads=text.num_key_value_heads,
            head_dim=self.head_dim,
            dtype=self.model.dtype,
            block_size=self.config.block_size,
            sliding_layers=sliding_layers,
            window=text.sliding_window if sliding_layers else None,
            block_slots=self.backend.block_slots(self.config.block_size),
        )

    def initialize_kv_cache(self, num_blocks: int, num_sliding_blocks: int = 0) -> None:
        """Allocates the pools of all layers: of the full group and, where the model has one, of the sliding group."""
        spec = self.get_kv_cache_spec()
        # One block more, which nobody reads: what must not be written to a shared block is written there.
        self.backend.allocate(spec, num_blocks + 1, num_sliding_blocks + 1, self.device)
        self.batch.set_num_blocks(num_blocks, num_sliding_blocks)
        # They hold the addresses of the pools before.
        self.graphs = None
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

    def _capture_graphs(self, record: Record) -> None:
        """Records the forward pass of single tokens at each of `tokenwise_graph_batch_sizes`, the largest first."""
        if self.use_piecewise_graph:
            raise NotImplementedError("forward passes are recorded whole, not in pieces between attentions")
        if not self.config.use_graphs or not self.tokenwise_graph_batch_sizes:
            return
        if not self.backend.reads_tensors:
            logger.warning("no graphs: attention backend %s reads numbers on the host", self.backend.name)
            return
        try:
            with torch.inference_mode():
                graphs = GraphTable(self.tokenwise_graph_batch_sizes, self._step_shape(), self.device)
                graphs.capture(self._decode, record)
        except RuntimeError as error:
            # A model that decides on the host while it runs, as some mixtures of experts do.
            logger.warning("no graphs: this model's steps cannot be recorded: %s", error)
            return
        self.graphs = graphs
        logger.info("recorded graphs of %s tokens", ", ".join(map(str, graphs.sizes)))

    def _step_shape(self) -> StepShape:
        text = self.model.config.get_text_config()
        spec = self.get_kv_cache_spec()
        num_blocks, num_sliding_blocks = self.batch.num_blocks, self.batch.num_sliding_blocks
        max_blocks = min(num_blocks, -(-text.max_position_embeddings // spec.block_size))
        return StepShape(
            hidden_size=text.hidden_size,
            dtype=self.model.dtype,
            num_position_axes=self.family.num_position_axes,
            block_size=spec.block_size,
            full=PoolShape(max_blocks, num_blocks),
            sliding=None if spec.window is None else PoolShape(min(max_blocks, num_sliding_blocks), num_sliding_blocks),
        )

    def put_rows(self, fetched: FetchedRows) -> None:
        """Takes rows that arrived for a key that the scheduler has room for."""
        self.row_cache.put(fetched)

    def execute_model(self, output: SchedulerOutput) -> list[SampledToken]:
        """Runs one step; returns the next token of every request whose chunk reached its last known token.

        Of a chunk with drafts it returns as many tokens as were guessed rightly, and the one after.
        """
        self._update_states(output)
        is_alone = self.config.deterministic and not self.is_batch_invariant
        passes = [(chunk,) for chunk in output.chunks] if is_alone else [output.chunks]
        return [token for chunks in passes if chunks for token in self._execute_chunks(chunks)]

    def _execute_chunks(self, chunks: tuple[ScheduledChunk, ...]) -> list[SampledToken]:
        with torch.inference_mode():
            inputs = self._prepare_inputs(chunks)
            logits = self._forward(inputs, self._embed(inputs.flat, chunks))
            return self._sample(inputs.flat.sampled_ids, logits)

    def _update_states(self, output: SchedulerOutput) -> None:
        """Forgets what left, learns what came, brings block tables up to date."""
        for request_id in output.released:
            self.batch.remove(request_id)
        for key, rows in output.evicted_rows:
            self.row_cache.drop(key, rows)
        for admitted in output.admitted:
            self.batch.add(admitted)
        for chunk in output.chunks:
            row = self.batch[chunk.request_id]
            row.set_blocks(chunk)
            row.set_drafts(chunk.draft_ids)

    def _prepare_inputs(self, chunks: tuple[ScheduledChunk, ...]) -> PreparedInputs:
        """Chunks of prompts and single new tokens alike, flattened into one batch."""
        flat = self.batch.flatten(chunks)
        return PreparedInputs(
            flat=flat,
            positions=self.transfer.move(torch.from_numpy(flat.positions)),
            metadata=step_metadata(
                flat,
                self.transfer.move,
                reads_tensors=self.backend.reads_tensors,
                is_mutual_beyond_window=self.family.mask is Mask.PROMPT,
            ),
            sampled_indexes=self.transfer.move(torch.from_numpy(flat.sampled_indexes)),
        )

    def _calc_mrope_positions(self, positions: Tensor) -> Tensor:
        """`[num_axes, num_tokens]` as the model wants it: `[1, T]` for plain positions, `[axes, 1, T]` for M-RoPE."""
        return positions if self.family.num_position_axes == 1 else positions[:, None]

    def _embed(self, inputs: FlatInputs, chunks: tuple[ScheduledChunk, ...]) -> Embedded:
        """Token table lookup with the images' rows over their placeholders."""
        table = self.model.get_input_embeddings()
        ids = self.transfer.move(torch.from_numpy(inputs.token_ids))
        # Placeholder ids may lie outside the table; their rows are overwritten anyway.
        looked_up: Tensor = table(ids.clamp_(max=table.num_embeddings - 1))
        hidden_size = looked_up.shape[1]
        # Text has nothing on the further levels, and no row is read from there.
        embeddings = F.pad(looked_up, (0, self.family.num_levels * hidden_size))
        placed = self._gather_encoder_outputs(embeddings, chunks)
        tokens, *levels = embeddings.split(hidden_size, dim=1)
        return Embedded(tokens, tuple(levels), placed)

    def _gather_encoder_outputs(self, embeddings: Tensor, chunks: tuple[ScheduledChunk, ...]) -> list[int]:
        """Writes the rows that the chunks reach, and no others, to `[num_tokens, row_elements]`; returns where."""
        placed: list[int] = []
        first = 0
        for chunk in chunks:
            stop = chunk.start + chunk.num_tokens
            for item in self.batch[chunk.request_id].images:
                if item.span.offset < stop and item.span.stop > chunk.start:
                    placed += self.row_cache.place(embeddings, first, item, chunk.start, stop)
            first += chunk.num_tokens
        return placed

    def _forward(self, inputs: PreparedInputs, embedded: Embedded) -> Tensor:
        """Logits of the sampled positions, `[num_sampled, vocab]`."""
        has_levels = bool(embedded.levels and embedded.row_indexes)
        step = inputs.metadata.paged
        if self.graphs is not None and step is not None and not has_levels and _is_decode(step):
            size = self.graphs.size_for(len(embedded.tokens))
            if size is not None:
                decoded = self.graphs.replay(DecodeInputs(embedded.tokens, inputs.positions, step), size)
                return decoded[inputs.sampled_indexes]
        arguments = self._model_arguments(embedded.tokens, inputs.positions)
        with forward_context(self.backend, inputs.metadata):
            if has_levels:
                return self._forward_with_levels(arguments, embedded, inputs.sampled_indexes)
            # The wrapper applies what its head has besides weights: scales, soft caps.
            logits: Tensor = self.model(**arguments, logits_to_keep=inputs.sampled_indexes).logits[0]
        return logits

    def _decode(self, inputs: DecodeInputs) -> Tensor:
        """What is recorded: logits of single tokens, `[num_tokens, vocab]`, by tensors alone."""
        metadata = decode_metadata(inputs.step, len(inputs.embeddings))
        with forward_context(self.backend, metadata):
            logits: Tensor = self.model(**self._model_arguments(inputs.embeddings, inputs.positions)).logits[0]
        return logits

    def _model_arguments(self, embeddings: Tensor, positions: Tensor) -> dict[str, Any]:
        return {
            "inputs_embeds": embeddings[None],
            "position_ids": self._calc_mrope_positions(positions),
            "attention_mask": None,
            "use_cache": False,
        }

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

    def _prepare_sampling(self, request_ids: tuple[RequestId, ...]) -> list[SampleRow]:
        """How each row of logits becomes a token, and by what came before it."""
        rows = [self.batch[request_id] for request_id in request_ids]
        return [SampleRow(row.params, ids, row.num_prompt_tokens) for row in rows for ids in row.contexts()]

    def _sample(self, request_ids: tuple[RequestId, ...], logits: Tensor) -> list[SampledToken]:
        if not request_ids:
            return []
        token_ids, logprobs = sample(logits, self._prepare_sampling(request_ids))
        tokens: list[SampledToken] = []
        first = 0
        for request_id in request_ids:
            row = self.batch[request_id]
            stop = first + 1 + len(row.draft_ids)
            num_taken = row.accept(token_ids[first:stop])
            taken = range(first, first + num_taken)
            tokens += [SampledToken(request_id, token_ids[index], logprobs[index]) for index in taken]
            first = stop
        return tokens


def _is_decode(step: PagedStep) -> bool:
    """Whether the step is a new token each of some sequences, none of which sees one behind it."""
    return step.max_query_len == 1 and step.mutual is None


def _sliding_layers(text: Any) -> frozenset[int]:
    """Layers that the text configuration gives a window while others see everything.

    Where all have one, or none, all are in the full group: an all-window model keeps every token, and masks.
    """
    types = getattr(text, "layer_types", None) or []
    sliding = frozenset(layer for layer, kind in enumerate(types) if kind == "sliding_attention")
    return sliding if len(sliding) < text.num_hidden_layers and getattr(text, "sliding_window", None) else frozenset()
