"""Finds a damaged last layer when a model is loaded: its tokens have logits of NaN, which samplers pass over."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from decoder_svc.runner.sampling.sample_row import SampleRow
from decoder_svc.runner.sampling.sampler import PendingSample, TokenSampler
from lookonce.errors import ModelFolderError
from lookonce.model.model_folder import NOT_A_NUMBER


class LogitCheck:
    """Takes the place of a sampler, and looks at the logits of all tokens. Unused tokens may have logits of -inf."""

    def __init__(self, sampler: TokenSampler) -> None:
        self._sampler = sampler
        self._largest: list[Tensor] = []

    @property
    def is_immediate(self) -> bool:
        """Whether the sampler knows its tokens when `launch` returns."""
        return self._sampler.is_immediate

    def launch(self, logits: Tensor, rows: Sequence[SampleRow], likeliest: Tensor | None = None) -> PendingSample:
        """Does what the sampler does, and keeps the largest logit of each row: NaN, if there is one."""
        self._largest.append(logits.amax(dim=1))
        return self._sampler.launch(logits, rows, likeliest)

    def refuse_nan(self) -> None:
        """Raises ModelFolderError if a row had a logit of NaN or infinity, or none above -inf. Waits for the device."""
        if not all(bool(largest.isfinite().all()) for largest in self._largest):
            raise ModelFolderError(NOT_A_NUMBER)
