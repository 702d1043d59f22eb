"""The model runner for CUDA devices."""

from __future__ import annotations

import logging

import torch

from decoder_svc.runner.attention import PAGED_ATTENTION
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.cuda.attention import AttentionNeeds, cuda_attention
from decoder_svc.runner.cuda.fused_stack_check import install_fused_stack
from decoder_svc.runner.cuda.graph_recorder import GraphRecorder
from decoder_svc.runner.cuda.paged_backend import PagedBackend
from decoder_svc.runner.graph_table import graph_batch_sizes
from decoder_svc.runner.host_transfer import PinnedTransfer
from decoder_svc.runner.worst_case import WorstCase
from lookonce.families.base import Mask
from lookonce.model.half_model import load_text_half

logger = logging.getLogger(__name__)


class GPUModelRunner(ModelRunnerBase):
    """Runs steps on the first CUDA device that this process sees."""

    # Kernels and copies of a step are submitted to one stream.
    overlaps_steps = True

    def _cache_device_properties(self) -> None:
        self.device = torch.device("cuda", 0)
        self.properties = torch.cuda.get_device_properties(self.device)
        self.transfer = PinnedTransfer(self.device)
        self._cannot_record = False
        self.tokenwise_graph_batch_sizes = graph_batch_sizes(self.config.max_num_seqs)
        if self.config.num_threads is not None:
            torch.set_num_threads(self.config.num_threads)
        logger.info("tensor work on %s", self.properties.name)

    def load_model(self) -> None:
        """Loads the language half into device memory and chooses the attention backend."""
        self.model = load_text_half(self.config.folder, self.config.dtype, PAGED_ATTENTION).to(self.device)
        text = self.model.config.get_text_config()
        needs = AttentionNeeds(
            num_heads=text.num_attention_heads,
            num_kv_heads=text.num_key_value_heads,
            head_dim=self.head_dim,
            dtype=self.model.dtype,
            block_size=self.config.block_size,
            has_mutual_spans=self.family.mask is not Mask.CAUSAL,
            device=self.device,
            capability=(self.properties.major, self.properties.minor),
            num_processors=self.properties.multi_processor_count,
        )
        self.backend = cuda_attention(needs)
        if isinstance(self.backend, PagedBackend):
            spec, num_axes = self.get_kv_cache_spec(), self.family.num_position_axes
            install_fused_stack(self.model, self.backend, spec, num_axes, self.device)

    def profile_run(self, worst: WorstCase) -> int:
        """See ModelRunnerBase. PyTorch's allocator gives the step's peak, the driver gives the memory of graphs."""
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

    def capture_model(self) -> None:
        """Records CUDA graphs that share one memory pool, unless an earlier recording failed."""
        if self._cannot_record:
            return
        recorder = GraphRecorder(self.device)
        self._capture_graphs(recorder.record)
        self._cannot_record = recorder.has_failed

    def _graph_bytes(self) -> int:
        """Returns the bytes of the largest graph, recorded once; smaller graphs reuse its memory."""
        sizes = self.tokenwise_graph_batch_sizes
        free_before, _ = torch.cuda.mem_get_info(self.device)
        self.tokenwise_graph_batch_sizes = sizes[-1:]
        self.capture_model()
        self.tokenwise_graph_batch_sizes = sizes
        torch.cuda.synchronize(self.device)
        free_after, _ = torch.cuda.mem_get_info(self.device)
        self.graphs = None
        torch.cuda.empty_cache()
        return max(0, int(free_before) - int(free_after))
