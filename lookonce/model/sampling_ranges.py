"""Ranges of sampling values, for requests and for the defaults of model folders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingRange:
    """An interval of allowed values. Its text is in the notation of intervals, such as (0, 1]."""

    low: float
    high: float
    is_low_excluded: bool = False

    def __contains__(self, value: float) -> bool:
        """False also for NaN, which compares False with every bound."""
        return self.low <= value <= self.high and not (self.is_low_excluded and value == self.low)

    def __str__(self) -> str:
        return f"{'(' if self.is_low_excluded else '['}{_bound(self.low)}, {_bound(self.high)}]"


_COUNT = SamplingRange(0, 2**32 - 1)
_OCCURRENCE_PENALTY = SamplingRange(-2.0, 2.0)

SAMPLING_RANGES: Mapping[str, SamplingRange] = {
    "temperature": SamplingRange(0.0, 100.0),
    "top_p": SamplingRange(0.0, 1.0, is_low_excluded=True),
    "top_k": _COUNT,
    "min_p": SamplingRange(0.0, 1.0),
    "repetition_penalty": SamplingRange(0.0, 10.0, is_low_excluded=True),
    "presence_penalty": _OCCURRENCE_PENALTY,
    "frequency_penalty": _OCCURRENCE_PENALTY,
    "min_new_tokens": _COUNT,
}
"""Ranges by the names of a request's fields, and of the fields of generation_config.json."""


def shown(value: float) -> str:
    """Returns all digits of an integer, and those that tell a float32 from its neighbours."""
    return str(value) if isinstance(value, int) or not math.isfinite(value) else f"{value:.8g}"


def _bound(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
