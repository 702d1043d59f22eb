"""One line of the report that `lookonce doctor` prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    subject: str
    is_fine: bool
    # The state that was found; if it is not fine, the fault and what to do about it.
    detail: str
