"""The model runner for CUDA devices."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import logging
from collections.abc import Callable

import torch

from decoder_svc.runner.adapters.adapter_table import AdaptedModules
from decoder_svc.runner.attention import PAGED_ATTENTION
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.cuda.attention import AttentionNeeds, cuda_attention
from decoder_svc.runner.cuda.fused_stack_check import install_fused_stack
from decoder_svc.runner.cuda.graph_recorder import GraphRecorder
from decoder_svc.runner.cuda.kernel_steps import kernel_steps
from decoder_svc.runner.cuda.nccl_engine import NcclEngine
from decoder_svc.runner.cuda.paged_backend import PagedBackend
from decoder_svc.runner.cuda.quantized_layers import (
    compile_quantized_kernels,
    install_quantized_layers,
    refuse_experts,
)
from decoder_svc.runner.graphs.chunk_table import chunk_graph_sizes
from decoder_svc.runner.graphs.decode_table import Decoded, graph_batch_sizes
from decoder_svc.runner.host_transfer import PinnedTransfer
from decoder_svc.runner.parallel.rank_group import RankGroup
from decoder_svc.runner.parallel.split_adapters import SplitAdapters
from decoder_svc.runner.parallel.split_model import split_model
from decoder_svc.runner.recurrent.kernel_trial import wrong_kernel_reason
from decoder_svc.runner.recurrent.recurrent_layers import RecurrentKernels
from decoder_svc.runner.sampling.device_penalties import DevicePenalties, Penalise, penalised_logits
from decoder_svc.runner.sampling.sampler import Sampler
from decoder_svc.runner.worst_case import NUM_BLOCKS, WorstCase, within_pool
from lookonce.families.base import Mask
from lookonce.model.half_model import load_text_half, text_child
from lookonce.model.kernels.quantized_layers import quantize_linears
from lookonce.model.text_support import CHUNKED_TYPE, query_heads, recurrent_kinds

logger = logging.getLogger(__name__)


def _penalised_logits() -> Penalise:
    """Returns the kernel for penalties, or PyTorch's operators where there is no Triton."""
    try:
        kernels = importlib.import_module("decoder_svc.runner.cuda.triton_penalties")
    except ImportError as error:
        logger.info("penalties: operators of PyTorch: %s", error)
        return penalised_logits
    penalise: Penalise = kernels.penalised_logits
    return penalise


class GPUModelRunner(ModelRunnerBase):
    """Runs steps on the first CUDA device that this process sees."""

    # Kernels and copies of a step are submitted to one stream.
    overlaps_steps = True
    serves_recurrent_layers = True
    rank_engine = NcclEngine()

    def _cache_device_properties(self) -> None:
        self.device = torch.device("cuda", 0)
        self.properties = torch.cuda.get_device_properties(self.device)
        self.transfer = PinnedTransfer(self.device)
        self._cannot_record = False
        self.tokenwise_graph_batch_sizes = graph_batch_sizes(self.config.max_num_seqs)
        self.chunk_graph_sizes = chunk_graph_sizes(self.config.max_num_batched_tokens)
        if self.config.num_threads is not None:
            torch.set_num_threads(self.config.num_threads)
        logger.info("tensor work on %s", self.properties.name)

    def load_model(self) -> None:
        """Loads the language half into device memory and chooses the attention backend."""
        self.model = load_text_half(self.config.folder, self.config.dtype, PAGED_ATTENTION, keep_codes=True)
        bits, ranks = self.config.quantize_bits, self.config.ranks
        if bits is not None:
            text_model = getattr(self.model.model, text_child(self.model))
            refuse_experts(text_model)
            # A rank's part of a layer is cut out of the codes of the whole layer.
            quantize_linears(self.model, text_model, bits, is_lazy=ranks is not None)
        self.adapters = self._adapter_table()
        if ranks is not None:
            self._split(ranks)
        num_processors = self.properties.multi_processor_count
        install_quantized_layers(self.model, self.device, num_processors, is_required=bits is not None)
        self.model.to(self.device)
        largest, text = self.head_shapes[-1], self.model.config.get_text_config()
        num_kv_heads = self.num_kv_heads or largest.num_kv_heads
        # A rank has the same share of the query heads.
        num_head_shares = largest.num_kv_heads // num_kv_heads
        needs = AttentionNeeds(
            head_counts=tuple(number // num_head_shares for number in query_heads(text)),
            num_kv_heads=num_kv_heads,
            head_dim=largest.head_dim,
            dtype=self.model.dtype,
            block_size=self.config.block_size,
            has_mutual_spans=self.family.mask is not Mask.CAUSAL,
            has_chunks=CHUNKED_TYPE in (getattr(text, "layer_types", None) or ()),
            device=self.device,
            capability=(self.properties.major, self.properties.minor),
            num_processors=num_processors,
            shared_bytes=self.properties.shared_memory_per_block_optin,
            is_rounded=self.config.rounds_kv_cache,
            value_dim=largest.value_dim,
        )
        self.backend = cuda_attention(needs)
        if self.adapters is not None:
            text_model = getattr(self.model.model, text_child(self.model))
            arguments = self.device, self.model.dtype
            self.adapters.apply_to(
                AdaptedModules(text_model, self.adapters, *arguments)
                if ranks is None
                else SplitAdapters(text_model, self.adapters, ranks, *arguments)
            )
        elif isinstance(self.backend, PagedBackend) and ranks is None:
            # Rounded keys would differ by more than mistakes do.
            spec = dataclasses.replace(self.get_kv_cache_spec(), is_rounded=False)
            num_axes = self.family.num_position_axes
            install_fused_stack(self.model, self.backend, spec, num_axes, self.device)
        self.recurrent_kernels = self._recurrent_kernels()
        vocab = self.model.get_output_embeddings().out_features
        penalties = DevicePenalties(
            self.config.max_num_seqs, vocab, self.device, self.transfer.move, _penalised_logits()
        )
        logger.info("counts of tokens, for penalties, take %.1f MiB", penalties.num_bytes / 2**20)
        self.sampler = Sampler(self.transfer.move, self.transfer.fetch, penalties)

    def _split(self, ranks: RankGroup) -> None:
        """Leaves this rank's part of the model, in transformers' modules."""
        self.num_kv_heads = split_model(self.model, ranks)
        # Recorded steps would have to begin on all ranks at once.
        self.tokenwise_graph_batch_sizes = self.chunk_graph_sizes = ()
        logger.info("rank %d of %d has its part of the language model, without graphs", ranks.rank, ranks.size)

    def _recurrent_kernels(self) -> RecurrentKernels:
        """Returns kernels for the model's recurrent layers, if it has any and they compute the right numbers here."""
        text_model = getattr(self.model.model, text_child(self.model))
        if not recurrent_kinds(text_model.config):
            return RecurrentKernels()
        try:
            triton = importlib.import_module("decoder_svc.runner.cuda.triton_recurrent")
        except ImportError as error:
            reason: str | None = f"Triton cannot be imported ({error})"
        else:
            kernels = RecurrentKernels(
                triton.TritonDeltaStep(), triton.TritonConvolutionStep(), triton.TritonScanStep()
            )
            reason = wrong_kernel_reason(text_model, self.model.dtype, kernels, self.device)
        if reason is None:
            return kernels
        logger.warning("recurrent layers: operators of PyTorch, and no graphs: %s", reason)
        return RecurrentKernels()

    def profile_run(self, worst: WorstCase) -> int:
        """Measures the step's peak by PyTorch's allocator, and the memory of graphs by the driver."""
        self._compile_kernels()
        free, _ = torch.cuda.mem_get_info(self.device)
        worst = within_pool(worst, free, self.get_kv_cache_spec().block_bytes, self.config.block_size)
        self._dummy_run(worst)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        resident = torch.cuda.memory_allocated(self.device)
        self._dummy_run(worst)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - resident
        torch.cuda.empty_cache()
        graphs = self._graph_bytes()
        free, _ = torch.cuda.mem_get_info(self.device)
        logger.info(
            "the heaviest step takes %d MiB and graphs %d MiB of %d MiB that are free",
            peak >> 20,
            graphs >> 20,
            free >> 20,
        )
        return max(0, int(free) - int(peak) - graphs)

    def _compile_kernels(self) -> None:
        """Runs a small step of every kind. `initialize_kv_cache` must be called afterwards."""
        with torch.inference_mode():
            compile_quantized_kernels(self.model)
        self.initialize_kv_cache(NUM_BLOCKS, NUM_BLOCKS)
        has_sliding_group = self.get_kv_cache_spec().window is not None
        sizes = self.config.max_num_seqs, self.family.mask, self.config.block_size
        has_states = self.recurrent is not None
        for step in kernel_steps(*sizes, has_sliding_group=has_sliding_group, has_states=has_states):
            self.execute_model(step)

    def capture_model(self) -> None:
        """Records CUDA graphs that share one memory pool, unless an earlier recording failed."""
        self._capture_and_note([])

    def _capture_and_note(self, free_bytes: list[int]) -> None:
        """Records graphs; appends the free memory after each of them."""
        if self._cannot_record:
            return
        recorder = GraphRecorder(self.device)

        def record(function: Callable[[], Decoded]) -> Callable[[], Decoded]:
            replay = recorder.record(function)
            free_bytes.append(self._free_bytes())
            return replay

        self._capture_graphs(record)
        self._cannot_record = recorder.has_failed

    def _graph_bytes(self) -> int:
        """Returns the bytes of all graphs, from recordings of the two largest of each kind.

        Others reuse the memory of the largest one. But each graph keeps its list of kernels, which takes about as much
        memory for any size.
        """
        all_sizes = self.tokenwise_graph_batch_sizes, self.chunk_graph_sizes
        free = [self._free_bytes()]
        self.tokenwise_graph_batch_sizes, self.chunk_graph_sizes = (sizes[-2:] for sizes in all_sizes)
        self._capture_and_note(free)
        num_recorded = len(self.tokenwise_graph_batch_sizes) + len(self.chunk_graph_sizes)
        self.tokenwise_graph_batch_sizes, self.chunk_graph_sizes = all_sizes
        num_others = sum(map(len, all_sizes)) - num_recorded
        has_graphs = self.graphs is not None
        self.graphs = None
        torch.cuda.empty_cache()
        taken = [max(0, before - after) for before, after in itertools.pairwise(free)]
        return sum(taken) + num_others * max(taken[1:], default=0) if has_graphs else 0

    def _free_bytes(self) -> int:
        torch.cuda.synchronize(self.device)
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free)
