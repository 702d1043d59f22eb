"""Turns a caller's request into the engine's: resolves images, builds the prompt, checks sampling values."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

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
from decoder_svc.prompt.video_frames import SplitVideo, VideoSplitter, check_sizes
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.sampling_params import SamplingParams
from lookonce.content_key import Tenant
from lookonce.model.generation_defaults import GenerationDefaults
from lookonce.threads import run_in_thread


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request: the engine's prompt and parameters, and the stop strings for the answer's text."""

    prompt: Prompt
    # The parameters of `sampling`, with max_tokens limited to the context.
    params: SamplingParams
    sampling: CheckedSampling


class RequestPreparer:
    """Prepares requests. Heavy work runs in threads. Use it on the event loop."""

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
        """`threads` run video splitting, templating and tokenizing."""
        self._builder = builder
        self._splitter = splitter
        self._resolver = resolver
        self._defaults = defaults
        self._limits = limits
        self._max_context_tokens = max_context_tokens
        self._threads = threads

    async def prepare(
        self,
        spec: PromptSpec,
        sampling: SamplingSpec,
        tenant: Tenant,
        charge_pixels: Callable[[int], None] | None = None,
    ) -> PreparedRequest:
        """Returns the checked request.

        `charge_pixels`, if given, is called with the number of pixels of the images that the request contains.

        Raises a subclass of InvalidInputError, EmbeddingNotCachedError or another LookonceError that names the problem.
        """
        checked = check_sampling(sampling, self._defaults, self._limits)
        prompt = await self.build_prompt(spec, tenant, charge_pixels)
        params = fit_to_context(checked, len(prompt.token_ids), self._max_context_tokens)
        return PreparedRequest(prompt, params, checked)

    async def build_prompt(
        self, spec: PromptSpec, tenant: Tenant, charge_pixels: Callable[[int], None] | None = None
    ) -> Prompt:
        """Returns the prompt alone, without checking that an answer fits behind it."""
        self._builder.check(spec)
        videos: list[SplitVideo] = []
        if isinstance(spec, ChatPrompt) and spec.videos:
            videos = await run_in_thread(self._threads, self._splitter.split_all, spec.visuals)
        images = await self._resolver.resolve(self._builder.image_sources(spec, videos), tenant)
        check_sizes(videos, ((image.width, image.height) for image in images if image.options.frame_size is not None))
        if charge_pixels is not None:
            charge_pixels(sum(image.num_inline_pixels for image in images))
        return await run_in_thread(self._threads, self._builder.build, spec, images, videos)
