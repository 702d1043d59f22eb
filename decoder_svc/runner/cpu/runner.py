"""The CPU runner."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from dataclasses import replace

import torch

from decoder_svc.runner.attention import PAGED_ATTENTION
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.cpu.attention import NativeBackend, cpu_attention
from decoder_svc.runner.cpu.native_model import use_kernels
from decoder_svc.runner.cpu.native_stack import NativeStack
from decoder_svc.runner.free_memory import free_bytes, measured_peak
from decoder_svc.runner.worst_case import WorstCase
from lookonce.model.half_model import load_text_half, text_child

logger = logging.getLogger(__name__)


class CPUModelRunner(ModelRunnerBase):
    """Runs on the CPUs that this process may use."""

    def _cache_device_properties(self) -> None:
        self.device = torch.device("cpu")
        num_threads = self.config.num_threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(num_threads)
        logger.info("tensor work on %d CPU threads", num_threads)

    def load_model(self) -> None:
        """Loads the language half; where there are kernels for it, copies its weights into their order."""
        self.model = load_text_half(self.config.folder, self.config.dtype, PAGED_ATTENTION)
        num_threads = torch.get_num_threads()
        self.backend = cpu_attention(self.model.dtype, self.head_dim, self.config.block_size, num_threads)
        if isinstance(self.backend, NativeBackend):
            spec, num_axes = self.get_kv_cache_spec(), self.family.num_position_axes
            self.is_batch_invariant = use_kernels(self.model, self.backend, spec, num_axes)

    def profile_run(self, worst: WorstCase) -> int:
        """Measures by the resident memory of this process and what machine and container still have."""
        if isinstance(self.backend, NativeBackend):
            # It reads keys where they lie: a longer context takes time in its step, and at start-up, but no memory.
            worst = replace(worst, context_tokens=min(worst.context_tokens, worst.num_tokens))
        free = free_bytes()
        text_model = getattr(self.model.model, text_child(self.model))
        abridged = text_model.last_layer_only() if isinstance(text_model, NativeStack) else nullcontext()
        with measured_peak() as peak, abridged:
            self._dummy_run(worst)
        logger.info("the heaviest step takes %d MiB of %d that were free", peak.extra_bytes >> 20, free >> 20)
        return max(0, free - peak.extra_bytes)

    def capture_model(self) -> None:
        """CPUs have no graphs to capture."""
