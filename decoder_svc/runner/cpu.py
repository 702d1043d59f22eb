"""The CPU runner."""

from __future__ import annotations

import logging
import os

import torch

from decoder_svc.runner.attention import PAGED_ATTENTION, SdpaBackend
from decoder_svc.runner.base import ModelRunnerBase
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
        self.backend = SdpaBackend()

    def profile_run(self) -> None:
        """The KV pool's size is given in bytes on this device, so there is nothing to measure."""

    def capture_model(self) -> None:
        """CPUs have no graphs to capture."""
