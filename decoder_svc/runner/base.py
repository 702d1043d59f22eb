"""ModelRunnerBase: the part of running a step that does not depend on the device.

A device overrides `_cache_device_properties`, `load_model`, `profile_run` and `capture_model`, and `_padded_num_tokens`
if its steps must have certain numbers of tokens; everything else is shared. docs/adding-a-device.md has an example. The
design follows the ModelRunnerBase proposal for vLLM, but the class is thin: input batch, attention backend,
row cache, graph table and sampler are separate parts with one job each.
"""

from __future__ import annotations

import functools
import logging
import pathlib
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from decoder_svc.prompt.family import DecoderFamily
from decoder_svc.rows.fetched_rows import FetchedRows
from decoder_svc.runner.adapters.adapter_table import AdapterTable
from decoder_svc.runner.attention import AttentionBackend, forward_context, register_paged_attention
from decoder_svc.runner.graphs.chunk_table import ChunkShape
from decoder_svc.runner.graphs.decode_table import Decoded, Record, StepShape
from decoder_svc.runner.graphs.inputs import PoolShape
from decoder_svc.runner.graphs.sparse_activations import fix_sparse_activations
from decoder_svc.runner.graphs.step_graphs import GraphSizes, StepGraphs
from decoder_svc.runner.host_transfer import HostTransfer
from decoder_svc.runner.input_batch import FlatInputs, InputBatch
from decoder_svc.runner.kv_cache_spec import KVCacheSpec, layer_window, layers_with_window
from decoder_svc.runner.language_pass import LanguagePass, wraps_nothing
from decoder_svc.runner.padding import padded_inputs
from decoder_svc.runner.parallel.leader import Leader, LeadingPass
from decoder_svc.runner.parallel.rank_engine import RankEngine
from decoder_svc.runner.prompt_results.pooling import HiddenStates, pooled, wants_hidden_states
from decoder_svc.runner.prompt_results.prompt_logprobs import note_prompt_logprobs, wants_prompt_logprobs
from decoder_svc.runner.recurrent.recurrent_layers import RecurrentKernels, RecurrentLayers
from decoder_svc.runner.row_cache import RowCache
from decoder_svc.runner.runner_config import RunnerConfig
from decoder_svc.runner.sampled.constrained_sample import begin_masks, launch_sample
from decoder_svc.runner.sampled.pending_step import PendingStep
from decoder_svc.runner.sampled.token_feed import TokenFeed
from decoder_svc.runner.sampling.logit_check import LogitCheck
from decoder_svc.runner.sampling.sampler import Sampler, TokenSampler
from decoder_svc.runner.state_step import PoolSizes
from decoder_svc.runner.step_metadata import Embedded, PreparedInputs, step_metadata
from decoder_svc.runner.worst_case import NUM_BLOCKS, WorstCase, worst_case_rows, worst_case_step
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.scheduler_output import SampledToken, ScheduledChunk, SchedulerOutput
from lookonce.errors import ConfigurationError, ModelFolderError
from lookonce.families.base import Mask
from lookonce.model.adapter_folder import AdapterFolder
from lookonce.model.half_model import text_child
from lookonce.model.structure.fixed_embeddings import fixed_embeddings
from lookonce.model.text_support import (
    HeadShape,
    head_shape,
    key_sources,
    layers_without_keys,
    recurrent_kinds,
)
from lookonce.model.weight_bytes import weight_bytes

logger = logging.getLogger(__name__)


class ModelRunnerBase(ABC):
    """Owns the language model, the KV pools and the rows on the device; turns a SchedulerOutput into tokens."""

    device: torch.device
    model: Any
    backend: AttentionBackend
    # Copies numbers and rows to the device; a plain HostTransfer unless the device sets its own.
    transfer: HostTransfer
    # None: there are no adapters.
    adapters: AdapterTable | None = None
    # KV heads of this process's part of a split model; None: all.
    num_kv_heads: int | None = None
    # Tells the other ranks of a split model; None on those, and in a process with the whole model.
    leader: Leader | None = None
    language: LanguagePass | LeadingPass
    # Numbers of tokens at which steps are recorded as graphs, ascending; a step is padded to the next number. The first
    # attribute is for steps of single tokens, the second for steps with prompt chunks.
    tokenwise_graph_batch_sizes: tuple[int, ...] = ()
    chunk_graph_sizes: tuple[int, ...] = ()
    # Whether the loaded model gives a token the same logits, bit for bit, in any batch.
    is_batch_invariant: bool = False
    # Whether the engine launches a step while the one before it runs. True where `launch` returns before the device is
    # done, and the device computes steps in the order in which they were launched.
    overlaps_steps: bool = False
    # Whether the device computes recurrent layers, such as those of Qwen3.5, LFM2 and Nemotron-H.
    serves_recurrent_layers: bool = False
    # Moves tensors between the processes of a split model (runner/parallel). None: the device computes whole models.
    rank_engine: RankEngine | None = None
    # Whether late layers that read the keys of others may compute only the sampled tokens. Steps may then have any
    # number of tokens, and are not recorded.
    computes_any_tokens = False
    # The device's kernels for recurrent layers.
    recurrent_kernels = RecurrentKernels()

    def __init__(self, config: RunnerConfig, family: DecoderFamily) -> None:
        self.config = config
        self.family = family
        self._cache_device_properties()
        if not hasattr(self, "transfer"):
            self.transfer = HostTransfer(self.device)
        register_paged_attention()
        self.sampler: TokenSampler = Sampler(self.transfer.move, self.transfer.fetch)
        self.load_model()
        if config.rounds_kv_cache and not self.backend.can_round:
            raise ConfigurationError(
                f"kv_cache_dtype int8 is not offered by the attention backend {self.backend.name}, but by our own "
                "kernels; leave it out"
            )
        if config.rounds_kv_cache and self.get_kv_cache_spec().value_dim is not None:
            raise ConfigurationError(
                "kv_cache_dtype int8 is not offered for latent attention, where all heads would read the same rounding "
                "errors in keys and values; leave it out"
            )
        fix_sparse_activations(getattr(self.model.model, text_child(self.model)), self.model.dtype)
        # None: the model has no recurrent layers.
        self.recurrent = self._install_recurrent_layers()
        if config.ranks is None:
            self._load_adapters()
        experts, padded = family.image_expert_ids, family.padded_input_ids
        self.language = LanguagePass(
            self.model,
            self.backend,
            family.num_levels,
            family.level_arguments,
            self._calc_mrope_positions,
            torch.tensor(experts, device=self.device) if experts else None,
            None if padded is None else torch.tensor(padded, dtype=torch.int64, device=self.device),
            fixed_embeddings(self.model),
            can_narrow=self.computes_any_tokens,
        )
        with torch.inference_mode():
            is_direct = wraps_nothing(self.language, family.num_position_axes, self.device)
        self.language = replace(self.language, is_direct=is_direct)
        self.hidden_states = HiddenStates(self.model)
        # Bytes that the weights take on the device.
        self.weight_bytes = weight_bytes(self.model)
        logger.info("the language model's weights take %.1f MiB on %s", self.weight_bytes / 2**20, self.device)
        # Graphs that `capture_model` recorded over the current KV cache.
        self.graphs: StepGraphs | None = None
        has_sliding_group = self.get_kv_cache_spec().window is not None
        self.batch = InputBatch(config.block_size, family.num_position_axes, has_sliding_group=has_sliding_group)
        self.row_cache = RowCache(self.transfer, self.model.dtype)
        self.feed = TokenFeed(self.transfer.move)

    def lead(self, leader: Leader) -> None:
        """Makes this runner the one that tells the other ranks of a split model what to compute."""
        assert isinstance(self.language, LanguagePass), "it is called once"
        self.leader, self.language = leader, LeadingPass(self.language, leader)
        if self.adapters is not None:
            self.adapters.lead(leader.place_adapter)
            self._load_adapters()

    # Overridden by each device.

    @abstractmethod
    def _cache_device_properties(self) -> None:
        """Sets `device`, and the device's own `transfer` and graph sizes if it has any."""

    @abstractmethod
    def load_model(self) -> None:
        """Sets `model`, the language half, and `backend`."""

    @abstractmethod
    def profile_run(self, worst: WorstCase) -> int:
        """Runs the heaviest step once; returns the bytes that stay free during it, which the KV pool may use."""

    @abstractmethod
    def capture_model(self) -> None:
        """Calls `_capture_graphs` on devices that have graphs. Called after `initialize_kv_cache`."""

    def _adapter_table(self) -> AdapterTable | None:
        """Returns a table for `load_model` to apply to the layers; None if there will be no adapters.

        Call it before kernels take the places of the model's layers.
        """
        return None if self.config.adapters is None else AdapterTable(self.model)

    def _install_recurrent_layers(self) -> RecurrentLayers | None:
        """Raises ConfigurationError if the model has recurrent layers that this device does not know."""
        text = self.model.config.get_text_config()
        if not recurrent_kinds(text):
            return None
        named = f"{self.family.title} has recurrent layers (linear attention, short convolutions or Mamba2)"
        if not self.serves_recurrent_layers:
            raise ConfigurationError(f"{named}, which {type(self).__name__} does not compute yet: use the CPU")
        return RecurrentLayers(
            getattr(self.model.model, text_child(self.model)), self.model.dtype, self.recurrent_kernels
        )

    def _load_adapters(self) -> None:
        """Raises ModelFolderError for an adapter that does not fit the model, ConfigurationError if none is served."""
        if self.config.adapters is None:
            return
        if self.adapters is None or not self.adapters.is_applied:
            raise ConfigurationError(f"--adapters: {type(self).__name__} serves no adapters yet")
        with torch.inference_mode():
            for folder in self.config.adapters:
                self.adapters.add(folder.fingerprint, self.adapters.read(folder))

    # Overridden by devices whose steps must have certain numbers of tokens.

    def _padded_num_tokens(self, num_tokens: int) -> int:
        """Returns the number of tokens, at least `num_tokens`, that a step of `num_tokens` is padded to.

        The default pads nothing. Only tokens are padded: the numbers of sequences and of sampled tokens still vary.
        """
        return num_tokens

    # Shared by all devices.

    def get_model(self) -> Any:
        """Returns the language half of the model."""
        return self.model

    @property
    def head_shapes(self) -> list[HeadShape]:
        """The shapes of keys and values that layers of the whole model have, the largest heads last."""
        text = self.model.config.get_text_config()
        shapes = {head_shape(text, layer) for layer in range(text.num_hidden_layers)}
        return sorted(shapes, key=lambda shape: shape.head_dim)

    def get_kv_cache_spec(self) -> KVCacheSpec:
        """Returns the shape of the KV cache that this model needs."""
        text = self.model.config.get_text_config()
        sliding_layers = layers_with_window(text)
        full = next(layer for layer in range(text.num_hidden_layers) if layer not in sliding_layers)
        heads, is_mixed = head_shape(text, full), getattr(text, "is_heterogeneous", False)
        return KVCacheSpec(
            num_layers=text.num_hidden_layers,
            num_kv_heads=self.num_kv_heads or heads.num_kv_heads,
            head_dim=heads.head_dim,
            dtype=self.model.dtype,
            block_size=self.config.block_size,
            sliding_layers=sliding_layers,
            window=layer_window(text, min(sliding_layers)) if sliding_layers else None,
            block_slots=self.backend.block_slots(self.config.block_size),
            keyless_layers=layers_without_keys(text),
            sliding_heads=head_shape(text, min(sliding_layers)) if sliding_layers and is_mixed else None,
            key_sources=key_sources(text),
            is_rounded=self.config.rounds_kv_cache,
            value_dim=heads.value_dim,
        )

    def initialize_kv_cache(self, num_blocks: int, num_sliding_blocks: int = 0, num_snapshots: int = 0) -> None:
        """Allocates the KV pools of all layers: the full group and, if the model has one, the sliding group.

        Recurrent layers get a state for each running request, and `num_snapshots` more.
        """
        spec = self.get_kv_cache_spec()
        if self.leader is not None:
            self.leader.allocate(num_blocks, num_sliding_blocks, num_snapshots)
        # One extra block per pool that nobody reads: writes that must not touch a shared block go there.
        self.backend.allocate(spec, num_blocks + 1, num_sliding_blocks + 1, self.device)
        self.batch.set_num_blocks(num_blocks, num_sliding_blocks)
        if self.recurrent is not None:
            sizes = PoolSizes(self.config.max_num_seqs, num_snapshots)
            self.recurrent.allocate(sizes, self.device)
            num_mib = sizes.num_states * self.recurrent.state_bytes / 2**20
            logger.info("recurrent layers: %d snapshots, %.1f MiB with the states", num_snapshots, num_mib)
        # Recorded graphs hold the addresses of the old pools.
        self.graphs = None
        num_bytes = num_blocks * spec.block_bytes + num_sliding_blocks * spec.sliding_block_bytes
        logger.info(
            "KV cache: %d blocks of %d tokens, and %d for layers with a window, %.1f MiB, attention backend %s",
            num_blocks, spec.block_size, num_sliding_blocks, num_bytes / 2**20, self.backend.name,
        )  # fmt: skip

    def _dummy_run(self, worst: WorstCase) -> None:
        """Runs the heaviest step in a small temporary KV cache. `initialize_kv_cache` must be called afterwards.

        Raises ModelFolderError if the model computes NaN.
        """
        self.initialize_kv_cache(NUM_BLOCKS, NUM_BLOCKS)
        rows = worst_case_rows(worst)
        for fetched in rows:
            self.put_rows(fetched)
        step = worst_case_step(
            worst,
            self.config.block_size,
            self.get_kv_cache_spec().window,
            self.family.mask,
            has_states=self.recurrent is not None,
        )
        if self.adapters is not None and self.adapters.fingerprints:
            adapter = self.adapters.fingerprints[0]
            step = replace(step, admitted=tuple(replace(each, adapter=adapter) for each in step.admitted))
        sampler = self.sampler
        self.sampler = check = LogitCheck(sampler)
        self.execute_model(step)
        self.sampler = sampler
        check.refuse_nan()
        released = tuple(admitted.request_id for admitted in step.admitted)
        evicted = tuple((fetched.key, fetched.rows) for fetched in rows)
        self.execute_model(SchedulerOutput((), (), released, evicted, ()))

    def _capture_graphs(self, record: Record) -> None:
        """Records steps of `chunk_graph_sizes` and of `tokenwise_graph_batch_sizes`, largest first."""
        if not self.config.use_graphs or not self.tokenwise_graph_batch_sizes:
            return
        if not self.backend.reads_tensors:
            logger.warning("no graphs: attention backend %s reads step metadata on the host", self.backend.name)
            return
        if not isinstance(self.language, LanguagePass):
            logger.warning("no graphs: the model is split over several processes")
            return
        if self.language.image_expert_ids is not None:
            logger.warning("no graphs: in each layer, this model reads on the host which tokens belong to images")
            return
        sizes = GraphSizes(self.tokenwise_graph_batch_sizes, self.chunk_graph_sizes)
        if self.recurrent is not None and not self.recurrent.have_kernels:
            logger.warning("no graphs: without kernels, recurrent layers read on the host where their states are")
            return
        if self.adapters is not None:
            # Steps with adapters are never replayed.
            self.adapters.begin_step((), ())
        try:
            with torch.inference_mode():
                graphs = StepGraphs(sizes, self._step_shape(), self._chunk_shape(), self.transfer)
                graphs.capture(self.language, record)
        except RuntimeError as error:
            # Some models read tensor values on the host during a pass, for example mixtures of experts.
            logger.warning("no graphs: this model's steps cannot be recorded: %s", error)
            return
        self.graphs = graphs
        logger.info("recorded graphs of single tokens and of chunks: %s", graphs.sizes)

    def _step_shape(self) -> StepShape:
        text = self.model.config.get_text_config()
        spec = self.get_kv_cache_spec()
        longest = -(-text.max_position_embeddings // spec.block_size)
        # Padding is a sequence as well, even in a pool of a few blocks: all its entries are the unread block.
        padding = -(-max(self.chunk_graph_sizes, default=1) // spec.block_size)

        def pool(num_blocks: int) -> PoolShape:
            return PoolShape(max(min(num_blocks, longest), padding), num_blocks)

        return StepShape(
            num_position_axes=self.family.num_position_axes,
            block_size=spec.block_size,
            full=pool(self.batch.num_blocks),
            sliding=None if spec.window is None else pool(self.batch.num_sliding_blocks),
            states=None if self.recurrent is None else self.recurrent.sizes,
        )

    def _chunk_shape(self) -> ChunkShape:
        mask = self.family.mask
        hidden_size = self.model.get_input_embeddings().embedding_dim
        return ChunkShape(
            row_elements=(1 + self.family.num_levels) * hidden_size,
            dtype=self.model.dtype,
            is_mutual_beyond_window=None if mask is Mask.CAUSAL else mask is Mask.PROMPT,
        )

    def read_adapter(self, name: str, folder: str, fingerprint: str) -> Any:
        """Reads the adapter of a folder, which must have this fingerprint, for `add_adapter`.

        Any thread may call it. Raises ModelFolderError, also for a runner that serves no adapters.
        """
        if self.adapters is None:
            raise ModelFolderError("this decoder was not started for adapters")
        opened = AdapterFolder.open(name, pathlib.Path(folder))
        if opened.fingerprint != fingerprint:
            raise ModelFolderError(f"adapter {name}: the folder has changed while it was loaded; try again")
        with torch.inference_mode():
            return self.adapters.read(opened)

    def add_adapter(self, fingerprint: str, prepared: Any) -> None:
        """Adds an adapter that was read; the next steps may have requests for it."""
        assert self.adapters is not None, "nothing was read"
        self.adapters.add(fingerprint, prepared)

    def drop_adapter(self, fingerprint: str) -> None:
        """Frees an adapter, which no request in the batch may have."""
        if self.adapters is not None:
            self.adapters.drop(fingerprint)

    def has_adapter(self, fingerprint: str | None) -> bool:
        """Whether requests may have this adapter. None: the base model."""
        return fingerprint is None or (self.adapters is not None and fingerprint in self.adapters)

    def put_rows(self, fetched: FetchedRows) -> None:
        """Stores fetched rows on the device. The scheduler has reserved room for them."""
        self.row_cache.put(fetched)

    def execute_model(self, output: SchedulerOutput) -> list[SampledToken]:
        """Runs one step; returns the next token of every request whose chunk reached its last known token.

        A chunk with drafts returns the drafts that were accepted and one more token.
        """
        return self.launch(output).tokens()

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Submits one step to the device; its tokens are those of `execute_model`.

        The next step may be launched before the tokens are read if the result says so: ids that it samples reach the
        next step's inputs on the device.
        """
        self._update_states(output)
        is_alone = self.config.deterministic and not self.is_batch_invariant
        passes = [(chunk,) for chunk in output.chunks] if is_alone else [output.chunks]
        step = PendingStep()
        with torch.inference_mode():
            for chunks in passes:
                if chunks:
                    self._launch_chunks(chunks, step)
            self.feed.keep(step.sampled_ids)
        return step

    def _launch_chunks(self, chunks: tuple[ScheduledChunk, ...], step: PendingStep) -> None:
        flat = self._flattened(chunks)
        rows = [self.batch[request_id] for request_id in flat.sampled_ids]
        masks = begin_masks(rows)
        if self.adapters is not None:
            self.adapters.begin_step(chunks, [self.batch[chunk.request_id].adapter for chunk in chunks])
        has_adapters = self.adapters is not None and bool(self.adapters.tokens)
        # Graphs keep no hidden states, and know no adapters.
        describes_prompts = wants_prompt_logprobs(chunks, self.batch)
        keeps_hidden = describes_prompts or wants_hidden_states(chunks, self.batch)
        decoded = None if keeps_hidden or has_adapters else self._replayed(flat, chunks)
        embeddings: dict[RequestId, Tensor] = {}
        if decoded is not None:
            logits, likeliest = decoded.logits, decoded.likeliest
        else:
            if self.leader is not None:
                adapted = () if self.adapters is None else self.adapters.tokens
                self.leader.begin_step(flat, adapted, has_images=self.batch.has_image_tokens(chunks))
            inputs, likeliest = self.prepare_inputs(flat), None
            with self.hidden_states.keeping() if keeps_hidden else nullcontext():
                logits = self._forward(inputs, chunks, keeps_hidden=keeps_hidden, has_adapters=has_adapters)
            if keeps_hidden:
                hidden = self.hidden_states.take()
                embeddings = pooled(hidden, chunks, self.batch)
                if describes_prompts:
                    note_prompt_logprobs(hidden, chunks, self.batch, self.language.logits_of)
        if rows:
            sample = launch_sample(self.sampler, logits, rows, masks(), likeliest)
            step.add(sample, flat.sampled_ids, rows, embeddings)

    def _update_states(self, output: SchedulerOutput) -> None:
        """Removes released requests and evicted rows, adds admitted requests, updates block tables and drafts."""
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

    def _flattened(self, chunks: tuple[ScheduledChunk, ...]) -> FlatInputs:
        """Flattens all chunks, prompts and single new tokens alike, into one batch, and pads it."""
        flat = self.batch.flatten(chunks)
        # The extra blocks of `initialize_kv_cache`.
        unread = (self.batch.num_blocks, self.batch.num_sliding_blocks)
        num_tokens = self._padded_num_tokens(len(flat.token_ids))
        return padded_inputs(flat, num_tokens, block_size=self.config.block_size, unread_blocks=unread)

    def prepare_inputs(self, flat: FlatInputs) -> PreparedInputs:
        """Copies a step's inputs to the device."""
        with self.transfer.gathered() as move:
            inputs = PreparedInputs(
                flat=flat,
                positions=move(torch.from_numpy(flat.positions)),
                metadata=step_metadata(
                    flat,
                    move,
                    reads_tensors=self.backend.reads_tensors,
                    is_mutual_beyond_window=self.family.mask is Mask.PROMPT,
                    state_step=None if self.recurrent is None else self.recurrent.step(flat, move),
                ),
                token_ids=move(torch.from_numpy(flat.token_ids)),
                sampled_indexes=move(torch.from_numpy(flat.sampled_indexes)),
            )
        self.feed.write(flat.unknown, inputs.token_ids)
        return inputs

    def _replayed(self, flat: FlatInputs, chunks: tuple[ScheduledChunk, ...]) -> Decoded | None:
        """Returns the results of the sampled tokens if a graph computes this step, otherwise None."""
        if self.graphs is None:
            return None
        has_images = self.batch.has_image_tokens(chunks)
        place_rows = functools.partial(self._gather_encoder_outputs, chunks=chunks) if has_images else None
        return self.graphs.replay(flat, functools.partial(self.feed.write, flat.unknown), place_rows)

    def _calc_mrope_positions(self, positions: Tensor) -> Tensor:
        """Reshapes `[num_axes, num_tokens]` for the model: `[1, T]` for plain positions, `[axes, 1, T]` for M-RoPE."""
        return positions if self.family.num_position_axes == 1 else positions[:, None]

    def _embed(self, inputs: PreparedInputs, chunks: tuple[ScheduledChunk, ...]) -> Embedded:
        """Looks tokens up in the embedding table and replaces placeholders with the rows of images."""
        embeddings = self.language.look_up_rows(inputs.token_ids)
        placed = self._gather_encoder_outputs(embeddings, chunks)
        tokens, *levels = self.language.split_levels(embeddings)
        return Embedded(tokens, tuple(levels), placed)

    def _gather_encoder_outputs(self, embeddings: Tensor, chunks: tuple[ScheduledChunk, ...]) -> list[int]:
        """Writes the rows inside the chunks to `[num_tokens, row_elements]`; returns the indexes of their tokens."""
        placed: list[int] = []
        first = 0
        for chunk in chunks:
            stop = chunk.start + chunk.num_tokens
            for item in self.batch[chunk.request_id].images:
                if item.span.offset < stop and item.span.stop > chunk.start:
                    placed += self.row_cache.place(embeddings, first, item, chunk.start, stop)
            first += chunk.num_tokens
        return placed

    def _forward(
        self,
        inputs: PreparedInputs,
        chunks: tuple[ScheduledChunk, ...],
        *,
        keeps_hidden: bool = False,
        has_adapters: bool = False,
    ) -> Tensor:
        """Returns the logits of the sampled positions, `[num_sampled, vocab]`.

        With `keeps_hidden`, the language model gives its output to hooks.
        """
        with forward_context(self.backend, inputs.metadata):
            language, has_images = self.language, self.batch.has_image_tokens(chunks)
            if isinstance(language, LanguagePass) and language.takes_ids and not (keeps_hidden or has_images):
                is_all = len(inputs.sampled_indexes) == len(inputs.token_ids)
                sampled = None if is_all else inputs.sampled_indexes
                return language.logits_of_ids(inputs.token_ids, inputs.positions, sampled)
            embedded = self._embed(inputs, chunks)
            arguments = embedded.tokens, inputs.positions, inputs.sampled_indexes
            if not (embedded.levels and embedded.row_indexes):
                # Adapters are added to all tokens of the step.
                needs_all_tokens = keeps_hidden or has_adapters
                return self.language.logits(*arguments, inputs.token_ids, needs_all_tokens=needs_all_tokens)
            rows = self.transfer.move(torch.tensor(sorted(embedded.row_indexes)))
            has_row = torch.zeros(len(embedded.tokens), dtype=torch.bool, device=self.device).index_fill_(0, rows, True)
            levels = [level.index_select(0, rows) for level in embedded.levels]
            return self.language.logits_with_levels(*arguments, has_row, levels)
