"""The CPU runner."""

from __future__ import annotations

import logging
import os

import torch

from decoder_svc.runner.attention import PAGED_ATTENTION
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.cpu_attention import cpu_attention
from decoder_svc.runner.free_memory import free_bytes, measured_peak
from decoder_svc.runner.worst_case import WorstCase
from lookonce.half_model import load_text_half

logger = logging.getLogger(__name__)


class CPUModelRunner(ModelRunnerBase):
    """Runs on the CPUs that this process may use."""

    def _cache_device_properties(self) -> None:
        self.device = torch.device("cpu")
        num_threads = self.config.num_threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(num_threads)
        logger.info("tensor work on %d CPU threads", num_threads)

    def load_model(self) -> None:
        """Loads the language half; weights stay mapped from the file where dtype allows."""
        self.model = load_text_half(self.config.folder, self.config.dtype, PAGED_ATTENTION)
        self.backend = cpu_attention()

    def profile_run(self, worst: WorstCase) -> int:
        """Measures by the resident memory of this process and what machine and container still have."""
        free = free_bytes()
        with measured_peak() as peak:
            self._dummy_run(worst)
        logger.info("the heaviest step takes %d MiB of %d that were free", peak.extra_bytes >> 20, free >> 20)
        return max(0, free - peak.extra_bytes)

    def capture_model(self) -> None:
        """CPUs have no graphs to capture."""
