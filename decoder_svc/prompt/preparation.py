"""Request as stated → request that the engine takes: images resolved, prompt built, sampling checked."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from decoder_svc.prompt.generation_defaults import GenerationDefaults
from decoder_svc.prompt.image_resolver import ImageResolver
from decoder_svc.prompt.prompt_builder import PromptBuilder
from decoder_svc.prompt.prompt_spec import ChatPrompt, PromptSpec
from decoder_svc.prompt.sampling_check import (
    CheckedSampling,
    SamplingLimits,
    SamplingSpec,
    check_sampling,
    fit_to_context,
)
from decoder_svc.prompt.video_frames import SplitVideo, VideoSplitter
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.sampling_params import SamplingParams
from lookonce.content_key import Tenant
from lookonce.threads import run_in_thread


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """What the engine gets, and what the answer's text needs."""

    prompt: Prompt
    # Those of `sampling` with max_tokens fitted to the context.
    params: SamplingParams
    sampling: CheckedSampling


class RequestPreparer:
    """Prepares requests; the heavy parts run in threads. Use it from the event loop."""

    def __init__(
        self,
        builder: PromptBuilder,
        splitter: VideoSplitter,
        resolver: ImageResolver,
        defaults: GenerationDefaults,
        limits: SamplingLimits,
        max_context_tokens: int,
        threads: Executor,
    ) -> None:
        """`threads` split videos, template and tokenize."""
        self._builder = builder
        self._splitter = splitter
        self._resolver = resolver
        self._defaults = defaults
        self._limits = limits
        self._max_context_tokens = max_context_tokens
        self._threads = threads

    async def prepare(self, spec: PromptSpec, sampling: SamplingSpec, tenant: Tenant) -> PreparedRequest:
        """Raises the InvalidInputError, EmbeddingNotCachedError, … that says what is wrong with the request."""
        checked = check_sampling(sampling, self._defaults, self._limits)
        prompt = await self.build_prompt(spec, tenant)
        params = fit_to_context(checked, len(prompt.token_ids), self._max_context_tokens)
        return PreparedRequest(prompt, params, checked)

    async def build_prompt(self, spec: PromptSpec, tenant: Tenant) -> Prompt:
        """The prompt alone, however long."""
        self._builder.check(spec)
        videos: list[SplitVideo] = []
        if isinstance(spec, ChatPrompt) and spec.videos:
            videos = await run_in_thread(self._threads, self._splitter.split_all, spec.visuals)
        images = await self._resolver.resolve(self._builder.image_sources(spec, videos), tenant)
        return await run_in_thread(self._threads, self._builder.build, spec, images, videos)
