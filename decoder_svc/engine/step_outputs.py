"""Turns what the scheduler updated in a step into outputs of its requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from decoder_svc.scheduling.request import Request, RequestId
from decoder_svc.scheduling.request_output import RequestOutput
from decoder_svc.scheduling.scheduler_output import TokenUpdate


def outputs_of(updates: Sequence[TokenUpdate]) -> Iterator[tuple[RequestId, RequestOutput]]:
    """One output per request of a step, however many tokens the step gave it."""
    start = 0
    while start < len(updates):
        request = updates[start].request
        stop = start + 1
        while stop < len(updates) and updates[stop].request is request:
            stop += 1
        yield request.request_id, _output(request, updates[start:stop])
        start = stop


def _output(request: Request, updates: Sequence[TokenUpdate]) -> RequestOutput:
    """Returns the output with the latest tokens of a request."""
    tokens = [update.token for update in updates]
    finish_reason = updates[-1].finish_reason
    # The prompt's numbers are complete with the first token, unless the prompt is computed again.
    is_changed = request.num_output_tokens == len(updates) or finish_reason is not None or request.num_preemptions > 0
    return RequestOutput(
        token_ids=tuple([token.token_id for token in tokens]),
        logprobs=tuple([token.logprobs for token in tokens if token.logprobs is not None]),
        finish_reason=finish_reason,
        usage=replace(request.usage) if is_changed else None,
        # The accepted drafts of a step come first.
        was_draft=tuple([update.was_draft for update in updates]) if updates[0].was_draft else (),
    )
