"""Prepares a request for what it asks: answers, the likelihood of continuations, or an embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from decoder_svc.answer.choices import Prepared
from decoder_svc.prompt.preparation import RequestPreparer
from decoder_svc.prompt.prompt_spec import PromptSpec
from decoder_svc.prompt.sampling_check import NumChoices, SamplingSpec
from decoder_svc.scheduling.sampling_params import Pooling
from lookonce.content_key import Tenant


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request, and what is charged for its images."""

    tenant: Tenant
    request_id: str
    charge_pixels: Callable[[int], None]


class Task(Protocol):
    """The part of a request that is not its prompt."""

    @property
    def num_answers(self) -> int:
        """The number of requests that the engine gets."""

    @property
    def bypasses_prefix_cache(self) -> bool:
        """Whether every token of the prompt has to be computed."""

    async def prepare(self, preparer: RequestPreparer, spec: PromptSpec, caller: Caller) -> Prepared:
        """Returns the requests for the engine. Raises what `RequestPreparer.prepare` raises."""


@dataclass(frozen=True, slots=True)
class Generating:
    """A request for answers to the prompt."""

    sampling: SamplingSpec
    number: NumChoices

    @property
    def bypasses_prefix_cache(self) -> bool:
        """Log probabilities of the prompt need the hidden state of every token."""
        return self.sampling.prompt_logprobs is not None

    @property
    def num_answers(self) -> int:
        """The number of answers, with those that are dropped for better ones."""
        return self.number.num_answers

    async def prepare(self, preparer: RequestPreparer, spec: PromptSpec, caller: Caller) -> Prepared:
        """Returns a request that is submitted once for each answer."""
        return await preparer.prepare(spec, self.sampling, caller.tenant, caller.request_id, caller.charge_pixels)


@dataclass(frozen=True, slots=True)
class Scoring:
    """A request for the likelihood of continuations of the prompt."""

    # Texts or token ids.
    continuations: Sequence[str | tuple[int, ...]]
    # Alternatives to report for each token; None: no log probabilities but the token's own.
    num_logprobs: int | None
    bypasses_prefix_cache: bool = False

    @property
    def num_answers(self) -> int:
        """The number of continuations: each is an answer of the engine."""
        return len(self.continuations)

    async def prepare(self, preparer: RequestPreparer, spec: PromptSpec, caller: Caller) -> Prepared:
        """Returns a request for each continuation."""
        return await preparer.prepare_scoring(
            spec, self.continuations, self.num_logprobs, caller.tenant, caller.request_id, caller.charge_pixels
        )


@dataclass(frozen=True, slots=True)
class Embedding:
    """A request for the embedding of the prompt."""

    pooling: Pooling
    num_answers: int = 1

    @property
    def bypasses_prefix_cache(self) -> bool:
        """The mean needs the hidden state of every token, and the cache has keys and values only."""
        return self.pooling is Pooling.MEAN

    async def prepare(self, preparer: RequestPreparer, spec: PromptSpec, caller: Caller) -> Prepared:
        """Returns a request for one token, with which the embedding comes."""
        return await preparer.prepare_embedding(
            spec, self.pooling, caller.tenant, caller.request_id, caller.charge_pixels
        )
