"""Messages between scheduler and runner: the step to run, the sampled tokens, and the resulting request updates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from decoder_svc.scheduling.prompt import ImageItem, Positions, Span
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.request_output import FinishReason, TokenLogprobs
from decoder_svc.scheduling.row_range import RowRange
from decoder_svc.scheduling.sampling_params import SamplingParams, TokenConstraint
from lookonce.content_key import ContentKey, ProcessorOptions
from lookonce.image_file import ImageFile


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that the runner does not know yet: new, or readmitted after a preemption."""

    request_id: RequestId
    # The prompt and, after a preemption, the tokens generated before it.
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    images: tuple[ImageItem, ...]
    positions: Positions | None
    # Spans with bidirectional attention; no chunk ends inside one.
    mutual_spans: tuple[Span, ...]
    params: SamplingParams
    # None: any token may come next.
    constraint: TokenConstraint | None = None
    # Fingerprint of the LoRA adapter; None: the base model.
    adapter: str | None = None

    @classmethod
    def of(cls, request: Request) -> AdmittedRequest:
        """Returns the parts of a request that the runner needs."""
        return cls(
            request_id=request.request_id,
            token_ids=tuple(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            images=request.prompt.images,
            positions=request.prompt.positions,
            mutual_spans=request.prompt.mutual_spans,
            params=request.params,
            constraint=request.constraint,
            adapter=request.cache_scope.adapter,
        )


@dataclass(frozen=True, slots=True)
class SlidingTable:
    """Changes to a request's block table for the layers with a sliding window."""

    # Blocks before this index are released: none of the chunk's tokens attends to them.
    first: int
    # The table from index `start` on, with `start` ≥ `first`.
    start: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateUse:
    """The states of the recurrent layers that a chunk reads and writes."""

    # The request's own state: the chunk continues it and leaves the state behind its last token there.
    slot: int
    # The chunk continues this snapshot instead. None: it continues its own state, or zeros at the first token.
    loaded: int | None
    # (number of tokens, snapshot): copies of the state behind the request's first tokens, in ascending order.
    taken: tuple[tuple[int, int], ...]


# This class and the two at the end are not frozen: each step makes one of each for each request, and a frozen one takes
# several times as long to make. Nobody changes them.
@dataclass(slots=True)
class ScheduledChunk:
    """The tokens [start, start + num_tokens) of one request, to be computed in this step."""

    request_id: RequestId
    # The request's num_computed_tokens before this step.
    start: int
    # At least 1.
    num_tokens: int
    # Tokens before this index have their keys and values in shared blocks: the runner computes but does not write them.
    write_start: int
    # The request's block table from index `block_start` on, for the layers with full attention.
    block_start: int
    block_ids: tuple[int, ...]
    # Whether the chunk ends with the request's last known token, so that the next one is sampled.
    samples: bool
    # None: all layers share one block table.
    sliding: SlidingTable | None = None
    # Draft tokens at the chunk's end. The runner samples after the last known token and after each draft token, and
    # stops at the first sample that differs from its draft.
    draft_ids: tuple[int, ...] = ()
    # None: the model has no recurrent layers.
    states: StateUse | None = None


@dataclass(frozen=True, slots=True)
class RowFetch:
    """A range of one image's rows to be fetched to the device."""

    key: ContentKey
    rows: RowRange
    # Rows of the whole image.
    num_image_rows: int
    options: ProcessorOptions
    # The original file, to be encoded if no cache has the rows; None for a reference by digest.
    data: ImageFile | None
    # The first request that needs the rows; others may share the fetch.
    request_id: RequestId
    # `Prompt.removal_token` of this request: the encoder stores no image that was removed since.
    removal_token: bytes | None = None


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: everything that the runner and the fetcher need to carry it out."""

    # Requests that are new to the runner; each also has a chunk.
    admitted: tuple[AdmittedRequest, ...]
    # In scheduling order; may be empty.
    chunks: tuple[ScheduledChunk, ...]
    # Requests finished, aborted or preempted since the previous step; the runner drops them first.
    released: tuple[RequestId, ...]
    # Evicted rows; the runner frees them before rows of the same image arrive again.
    evicted_rows: tuple[tuple[ContentKey, RowRange], ...]
    # Fetches to start before the step runs, so that both overlap.
    fetches: tuple[RowFetch, ...]
    # Waiting requests that were ended because they can no longer meet their deadline.
    expired: tuple[RequestId, ...] = ()

    @property
    def num_scheduled_tokens(self) -> int:
        """Number of tokens computed in this step."""
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(slots=True)
class StepInProgress:
    """A step while the scheduler assembles it: what is in it so far, and what is left of its budget."""

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

    def output(
        self,
        released: tuple[RequestId, ...],
        evicted_rows: tuple[tuple[ContentKey, RowRange], ...],
        fetches: tuple[RowFetch, ...],
    ) -> SchedulerOutput:
        """Returns the step as the message to the runner and the fetcher."""
        admitted, chunks, expired = tuple(self.admitted), tuple(self.chunks), tuple(self.expired)
        return SchedulerOutput(admitted, chunks, released, evicted_rows, fetches, expired)


@dataclass(slots=True)
class SampledToken:
    """One sampled token of a request. A chunk with accepted draft tokens yields several, in order."""

    request_id: RequestId
    token_id: int
    logprobs: TokenLogprobs | None
    # Whether the step behind has read another id in its place: that step's chunk of the request is void, and gives no
    # token.
    is_corrected: bool = False
    # Whether the model has computed NaN for it: the token means nothing.
    is_nan: bool = False


def tokens_by_request(sampled: Iterable[SampledToken]) -> dict[RequestId, list[SampledToken]]:
    """Returns each request's tokens, in order."""
    by_request: dict[RequestId, list[SampledToken]] = {}
    for token in sampled:
        by_request.setdefault(token.request_id, []).append(token)
    return by_request


@dataclass(slots=True)
class TokenUpdate:
    """One generated token, with the finish reason if it ended the request."""

    request: Request
    token: SampledToken
    finish_reason: FinishReason | None
    # Whether it was an accepted draft token.
    was_draft: bool = False
