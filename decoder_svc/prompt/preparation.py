"""Turns a caller's request into the engine's: resolves images, builds the prompt, checks sampling values.

The work is cut into pieces that take turns with those of other calls (preparation_threads.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from decoder_svc.constraint.constraint_checker import ConstraintChecker
from decoder_svc.prompt.chat_tools import ChatTools
from decoder_svc.prompt.image_resolver import ImageResolver
from decoder_svc.prompt.preparation_threads import PreparationThreads, caller_of
from decoder_svc.prompt.prompt_builder import PromptBuilder
from decoder_svc.prompt.prompt_spec import ChatPrompt, FileFacts, PromptSpec, TextPrompt, texts_of
from decoder_svc.prompt.sampling_check import (
    CheckedSampling,
    SamplingLimits,
    SamplingSpec,
    check_sampling,
    embedding_sampling,
    fit_to_context,
    fixed_sampling,
)
from decoder_svc.prompt.video_frames import SplitVideo, VideoSplitter, check_sizes
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.scheduling.sampling_params import Constraint, Pooling, SamplingParams
from decoder_svc.tools.answer_reader import AnswerForm
from lookonce.content_key import Tenant
from lookonce.errors import InvalidParameterError, located_in_image
from lookonce.model.generation_defaults import GenerationDefaults
from lookonce.turns.fair_queue import CallerId

# Seeds are unsigned numbers of 64 bits.
_NUM_SEEDS = 2**64
# Characters that a message, a part of it or a frame counts for. Rendering one takes up to 60 µs.
_CHARS_PER_PART = 64


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request: the engine's prompt and parameters, and the stop strings for the answer's text."""

    prompt: Prompt
    # The parameters of `sampling`, with max_tokens limited to the context.
    params: SamplingParams
    sampling: CheckedSampling
    # The parts that the answer may have; None: all of it is text.
    form: AnswerForm | None = None

    def choice(self, index: int) -> PreparedRequest:
        """Returns the request for the answer with this index, which counts up the seed.

        Only the first one gets the log probabilities of the prompt.
        """
        if index == 0:
            return self
        seed = None if self.params.seed is None else (self.params.seed + index) % _NUM_SEEDS
        return replace(self, params=replace(self.params, seed=seed, prompt_logprobs=None))


@dataclass(frozen=True, slots=True)
class PreparedScoring:
    """A checked request for the likelihood of continuations."""

    # One request per continuation; all have the same prompt.
    requests: tuple[PreparedRequest, ...]

    def choice(self, index: int) -> PreparedRequest:
        """Returns the request for the continuation with this index."""
        return self.requests[index]


class RequestPreparer:
    """Prepares requests. Heavy work runs in threads. Use it on the event loop."""

    def __init__(
        self,
        builder: PromptBuilder,
        tools: ChatTools,
        splitter: VideoSplitter,
        resolver: ImageResolver,
        defaults: GenerationDefaults,
        limits: SamplingLimits,
        max_context_tokens: int,
        threads: PreparationThreads,
        checker: ConstraintChecker,
        heard_removal: Callable[[], bytes | None] = lambda: None,
    ) -> None:
        """`heard_removal` returns the token of the last removal of images that this process has heard of."""
        self._builder = builder
        self._tools = tools
        self._splitter = splitter
        self._resolver = resolver
        self._defaults = defaults
        self._limits = limits
        self._max_context_tokens = max_context_tokens
        self._threads = threads
        self._checker = checker
        self._heard_removal = heard_removal

    async def prepare(
        self,
        spec: PromptSpec,
        sampling: SamplingSpec,
        tenant: Tenant,
        request_id: str,
        charge_pixels: Callable[[int], None] | None = None,
    ) -> PreparedRequest:
        """Returns the checked request.

        The tenant's requests take turns with those of other tenants, and with one another, by `request_id`. Cancelling
        the caller gives up what waits; a piece of work that has begun is finished in its thread.

        `charge_pixels`, if given, is called with the number of pixels of the images that the request contains.

        Raises a subclass of InvalidInputError, EmbeddingNotCachedError or another LookonceError that names the problem.
        """
        checked = check_sampling(sampling, self._defaults, self._limits)
        caller = caller_of(tenant, request_id)
        await self._check_constraint(caller, checked.params.constraint)
        if sampling.constraint is not None and isinstance(spec, ChatPrompt) and spec.shown_tools:
            raise InvalidParameterError(
                "chat.tools", f"cannot be combined with sampling.{sampling.constraint.kind.value}"
            )
        prompt = await self.build_prompt(spec, tenant, request_id, charge_pixels)
        form = None
        if isinstance(spec, ChatPrompt) and sampling.constraint is None:
            form, constraint = await self._form_of(caller, spec, prompt)
            if constraint is not None:
                checked = check_sampling(replace(sampling, constraint=constraint), self._defaults, self._limits)
                await self._check_constraint(caller, constraint)
        params = fit_to_context(checked, len(prompt.token_ids), self._max_context_tokens)
        return PreparedRequest(prompt, params, checked, form)

    async def prepare_scoring(
        self,
        spec: PromptSpec,
        continuations: Sequence[str | tuple[int, ...]],
        num_logprobs: int | None,
        tenant: Tenant,
        request_id: str,
        charge_pixels: Callable[[int], None] | None = None,
    ) -> PreparedScoring:
        """Returns the checked request for the likelihood of continuations. Raises what `prepare` raises.

        `num_logprobs` is the number of alternatives for each token.
        """
        prompt = await self.build_prompt(spec, tenant, request_id, charge_pixels)
        caller, cost = caller_of(tenant, request_id), _text_cost(spec)
        requests = []
        for index, continuation in enumerate(continuations):
            try:
                token_ids = await self._threads.compute_text(
                    caller, cost + len(continuation), self._builder.continuation_ids, spec, continuation
                )
            except InvalidParameterError as error:
                raise InvalidParameterError(f"continuations[{index}]", error.description) from None
            checked = fixed_sampling(token_ids, num_logprobs, self._limits)
            params = fit_to_context(checked, len(prompt.token_ids), self._max_context_tokens)
            requests.append(PreparedRequest(prompt, params, checked))
        return PreparedScoring(tuple(requests))

    async def prepare_embedding(
        self,
        spec: PromptSpec,
        pooling: Pooling,
        tenant: Tenant,
        request_id: str,
        charge_pixels: Callable[[int], None] | None = None,
    ) -> PreparedRequest:
        """Returns the checked request for the embedding of a prompt. Raises what `prepare` raises."""
        prompt = await self.build_prompt(spec, tenant, request_id, charge_pixels)
        checked = embedding_sampling(pooling)
        return PreparedRequest(
            prompt, fit_to_context(checked, len(prompt.token_ids), self._max_context_tokens), checked
        )

    async def _check_constraint(self, caller: CallerId, constraint: Constraint | None) -> None:
        if constraint is not None and not self._checker.is_served(constraint):
            await self._threads.compile(caller, len(constraint.text), self._checker.check, constraint)

    async def _form_of(
        self, caller: CallerId, chat: ChatPrompt, prompt: Prompt
    ) -> tuple[AnswerForm | None, Constraint | None]:
        """Returns how the answer is read and what it is bound to."""
        if not chat.shown_tools:
            return self._tools.form_of(chat, prompt.token_ids), None
        cost = sum(map(len, texts_of(chat)))
        form = await self._threads.compute_text(caller, cost, self._tools.form_of, chat, prompt.token_ids)
        assert form is not None, "an answer with functions is read"
        return form, await self._threads.compute_text(caller, cost, self._tools.constraint_of, chat, form)

    async def build_prompt(
        self,
        spec: PromptSpec,
        tenant: Tenant,
        request_id: str,
        charge_pixels: Callable[[int], None] | None = None,
    ) -> Prompt:
        """Returns the prompt alone, without checking that an answer fits behind it."""
        # Before anything waits: an image that is removed from here on is stored in no cache.
        removal_token = self._heard_removal()
        self._builder.check(spec)
        if isinstance(spec, ChatPrompt):
            self._tools.check(spec)
        caller = caller_of(tenant, request_id)
        videos = await self._split_videos(spec, caller) if isinstance(spec, ChatPrompt) and spec.videos else []
        images = await self._resolver.resolve(self._builder.image_sources(spec, videos), tenant, request_id)
        check_sizes(videos, ((image.width, image.height) for image in images if image.options.frame_size is not None))
        if charge_pixels is not None:
            charge_pixels(sum(image.num_inline_pixels for image in images))
        cost = _text_cost(spec)
        prompt = await self._threads.compute_text(caller, cost, self._builder.build, spec, images, videos)
        return replace(prompt, removal_token=removal_token)

    async def _split_videos(self, spec: ChatPrompt, caller: CallerId) -> list[SplitVideo]:
        """Reads the frames, one after the other, and splits the videos."""
        facts: list[FileFacts | None] = []
        for index, frame in self._splitter.frames_of(spec.visuals):
            with located_in_image(index):
                known = None
                if frame.data is not None:
                    known = await self._threads.read_file(caller, self._splitter.read, frame.data)
            facts.append(known)
        num_chars = _CHARS_PER_PART * len(facts)
        return await self._threads.compute_text(caller, num_chars, self._splitter.split_all, spec.visuals, facts)


def _text_cost(spec: PromptSpec) -> int:
    """Returns the number of characters that take as long to tokenize as this prompt takes to build."""
    if isinstance(spec, TextPrompt):
        return len(spec.text)
    if not isinstance(spec, ChatPrompt):
        return len(spec.token_ids)
    num_parts = sum(len(message.parts) for message in spec.messages)
    return sum(map(len, texts_of(spec))) + _CHARS_PER_PART * (len(spec.messages) + num_parts + len(spec.tools))
