"""Runs steps of 16, 32, 64, … tokens: the numbers that this device's programs exist for."""

from typing import Any

import torch

from decoder_svc.runner.attention import PAGED_ATTENTION, SdpaBackend
from decoder_svc.runner.base import ModelRunnerBase
from decoder_svc.runner.free_memory import free_bytes, measured_peak
from decoder_svc.runner.worst_case import WorstCase
from lookonce.model.half_model import load_text_half


def program_size(num_tokens: int) -> int:
    """Returns the smallest power of two, from 16 on, that holds a step."""
    return max(16, 1 << (num_tokens - 1).bit_length())


class FixedSteps(SdpaBackend):
    """Attention that has programs for some numbers of tokens only."""

    name = "fixed-steps"

    def forward(self, layer: int, query: torch.Tensor, *others: Any) -> torch.Tensor:
        """Refuses steps for which there is no program."""
        if len(query) != program_size(len(query)):
            raise ValueError(f"there is no program for {len(query)} tokens")
        return super().forward(layer, query, *others)


class FixedStepsRunner(ModelRunnerBase):
    """Overrides the four functions that a device must, and the one for fixed numbers of tokens."""

    def _cache_device_properties(self) -> None:
        self.device = torch.device("cpu")
        torch.set_num_threads(self.config.num_threads or 1)

    def load_model(self) -> None:
        """Loads the language half and chooses its attention."""
        self.model = load_text_half(self.config.folder, self.config.dtype, PAGED_ATTENTION).to(self.device)
        self.backend = FixedSteps()

    def profile_run(self, worst: WorstCase) -> int:
        """Measures resident memory during the heaviest step."""
        with measured_peak() as peak:
            free = free_bytes()
            self._dummy_run(worst)
        return max(0, free - peak.extra_bytes)

    def capture_model(self) -> None:
        """Does nothing, because this device has no graphs."""

    def _padded_num_tokens(self, num_tokens: int) -> int:
        return program_size(num_tokens)
