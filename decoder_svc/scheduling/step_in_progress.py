"""A step while the scheduler assembles it: what is in it so far, and what is left of its budget."""

from __future__ import annotations

from dataclasses import dataclass, field

from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.scheduler_output import AdmittedRequest, ScheduledChunk


@dataclass(slots=True)
class StepInProgress:
    """The chunks, admissions and expired requests of a step, and its remaining token budget."""

    token_budget: int
    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[AdmittedRequest] = field(default_factory=list)
    expired: list[RequestId] = field(default_factory=list)
    num_without_rows: int = 0
    has_preempted: bool = False
    # A request's next tokens form an uncuttable span that is larger than the remaining budget.
    lacks_budget: bool = False

    def add(self, chunk: ScheduledChunk) -> None:
        """Adds a chunk and takes its tokens from the budget."""
        self.chunks.append(chunk)
        self.token_budget -= chunk.num_tokens
