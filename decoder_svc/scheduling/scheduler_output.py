"""The one message from the scheduler to the runner, the answer, and what it means for requests."""

from __future__ import annotations

from dataclasses import dataclass

from decoder_svc.scheduling.prompt import ImageItem, Positions, Span
from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.request_output import FinishReason, TokenLogprobs
from decoder_svc.scheduling.row_range import RowRange
from decoder_svc.scheduling.sampling_params import SamplingParams
from lookonce.content_key import ContentKey, ProcessorOptions
from lookonce.image_file import ImageFile


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that the runner does not know: new, or back from preemption."""

    request_id: RequestId
    # Prompt and, after a preemption, what was generated before it.
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    images: tuple[ImageItem, ...]
    positions: Positions | None
    # Stretches whose tokens all see each other; no chunk ends inside one.
    mutual_spans: tuple[Span, ...]
    params: SamplingParams

    @classmethod
    def of(cls, request: Request) -> AdmittedRequest:
        """What the runner must know of a request."""
        return cls(
            request_id=request.request_id,
            token_ids=tuple(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            images=request.prompt.images,
            positions=request.prompt.positions,
            mutual_spans=request.prompt.mutual_spans,
            params=request.params,
        )


@dataclass(frozen=True, slots=True)
class SlidingTable:
    """What has changed in a request's block table of the layers with a sliding window."""

    # Blocks before this index are let go: none of the chunk's tokens looks at theirs.
    first: int
    # From this index on, not before `first`, the table is now as follows.
    start: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens [start, start + num_tokens) of one request are computed in this step."""

    request_id: RequestId
    # The request's num_computed_tokens before this step.
    start: int
    # At least 1.
    num_tokens: int
    # Tokens before this index have their keys and values in shared blocks: computed, but not written.
    write_start: int
    # From this index on the request's block table of the layers that see everything is now as follows.
    block_start: int
    block_ids: tuple[int, ...]
    # The chunk ends with the request's last known token: sample the next one.
    samples: bool
    # None: all layers share one block table.
    sliding: SlidingTable | None = None
    # The chunk's last tokens are guessed to be these: sample behind the last known one and behind each of them, as far
    # as what is sampled is what was guessed.
    draft_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RowFetch:
    """A range of one image's rows that must be brought to the device."""

    key: ContentKey
    rows: RowRange
    # Of the whole image.
    num_image_rows: int
    options: ProcessorOptions
    # The original file, to encode from when no cache has the rows; None: by digest only.
    data: ImageFile | None
    # The first that needs them; others may share the fetch.
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """Everything that the runner must know about one step."""

    # Requests that appear for the first time; each also has a chunk.
    admitted: tuple[AdmittedRequest, ...]
    # In scheduling order; may be empty.
    chunks: tuple[ScheduledChunk, ...]
    # Finished, aborted or preempted since the previous step: the runner forgets them first.
    released: tuple[RequestId, ...]
    # Rows whose room was given away: the runner frees them first.
    evicted_rows: tuple[tuple[ContentKey, RowRange], ...]
    # Rows to bring; started before the step runs, so that they travel meanwhile.
    fetches: tuple[RowFetch, ...]
    # Requests that were ended unstarted: their deadline cannot be met any more.
    expired: tuple[RequestId, ...] = ()

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of one request; where drafts were right, some in a row."""

    request_id: RequestId
    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """One generated token, and whether the request ended with it."""

    request: Request
    token: SampledToken
    finish_reason: FinishReason | None
    # It had been guessed and was computed before it was sampled.
    was_draft: bool = False
