"""Requests are checked in the order of cost, and prepared in threads that know the caller."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from decoder_svc.constraint.constraint_checker import ConstraintChecker
from decoder_svc.prompt.chat_tools import ChatTools
from decoder_svc.prompt.image_resolver import ImageResolver
from decoder_svc.prompt.preparation import RequestPreparer
from decoder_svc.prompt.preparation_threads import PreparationThreads
from decoder_svc.prompt.prompt_builder import PromptBuilder
from decoder_svc.prompt.prompt_spec import PromptSpec, TextPrompt, TokenPrompt
from decoder_svc.prompt.sampling_check import SamplingLimits, SamplingSpec
from decoder_svc.prompt.video_frames import VideoSplitter
from decoder_svc.scheduling.prompt import Prompt
from decoder_svc.service import LoadedText
from lookonce.content_key import DEFAULT_TENANT
from lookonce.errors import (
    ContextTooLongError,
    InvalidParameterError,
    LookonceError,
    PromptEmptyError,
    UnavailableError,
)
from lookonce.identity import CallerRole, Identity, acting_for, current_identity
from lookonce.media.image_header import ImageLimits
from lookonce.model.generation_defaults import GenerationDefaults
from tests.decoder_svc.constraint.demo_constraints import demo_vocabulary
from tests.decoder_svc.prompt.prompts import builder, chat, inline

CONTEXT = 32
LIMITS = SamplingLimits(vocab_size=256, max_stop_strings=4, max_logprobs=5, default_max_tokens=30)
IMAGE_LIMITS = ImageLimits(max_bytes=1000, max_pixels=1000, max_aspect=10)
TOKENS = TokenPrompt(tuple(range(20, 30)))


@pytest.fixture
def threads() -> Iterator[PreparationThreads]:
    threads = PreparationThreads()
    yield threads
    threads.close()


def preparer(text: LoadedText, threads: PreparationThreads, prompts: PromptBuilder | None = None) -> RequestPreparer:
    """Returns the preparer of a decoder without an encoder."""
    return RequestPreparer(
        builder(text, CONTEXT) if prompts is None else prompts,
        ChatTools(text.tokenizer, text.template),
        VideoSplitter(text.family, IMAGE_LIMITS),
        ImageResolver(None, None, IMAGE_LIMITS, threads),
        GenerationDefaults(),
        LIMITS,
        CONTEXT,
        threads,
        ConstraintChecker(demo_vocabulary),
    )


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, CONTEXT - 10), (5, 5)])
async def test_the_default_number_of_tokens_is_the_rest_of_the_context(
    llava_text: LoadedText, threads: PreparationThreads, max_tokens: int | None, expected: int
) -> None:
    prepared = await preparer(llava_text, threads).prepare(
        TOKENS, SamplingSpec(max_tokens=max_tokens), DEFAULT_TENANT, "request"
    )
    assert prepared.prompt.token_ids == TOKENS.token_ids
    assert prepared.params.max_tokens == expected
    assert prepared.sampling.params.max_tokens == (max_tokens or LIMITS.default_max_tokens)


async def test_a_prompt_alone_needs_no_room_for_an_answer(llava_text: LoadedText, threads: PreparationThreads) -> None:
    full = TokenPrompt(tuple(range(20, 20 + CONTEXT)))
    assert len((await preparer(llava_text, threads).build_prompt(full, DEFAULT_TENANT, "one")).token_ids) == CONTEXT
    with pytest.raises(ContextTooLongError):
        await preparer(llava_text, threads).prepare(full, SamplingSpec(), DEFAULT_TENANT, "one")


@pytest.mark.parametrize(
    ("spec", "sampling", "error"),
    [
        # Wrong sampling values are found before a wrong prompt,
        (TextPrompt(""), SamplingSpec(top_p=2.0), InvalidParameterError),
        # a wrong prompt before its images are asked for,
        (TextPrompt("", (inline(b"x"),)), SamplingSpec(), PromptEmptyError),
        # and images that cannot be had before the template is rendered.
        (chat("what", inline(b"x")), SamplingSpec(), UnavailableError),
    ],
    ids=["sampling", "prompt", "images"],
)
async def test_the_cheapest_check_that_fails_names_the_error(
    llava_text: LoadedText,
    threads: PreparationThreads,
    spec: PromptSpec,
    sampling: SamplingSpec,
    error: type[LookonceError],
) -> None:
    with pytest.raises(error):
        await preparer(llava_text, threads).prepare(spec, sampling, DEFAULT_TENANT, "one")


async def test_threads_know_for_whom_they_work(
    llava_text: LoadedText, threads: PreparationThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log lines and spans of the threads belong to the caller's request."""
    callers: list[Identity] = []
    original = PromptBuilder.build

    def build(self: PromptBuilder, *arguments: object) -> Prompt:
        callers.append(current_identity())
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PromptBuilder, "build", build)
    caller = Identity("shop", "acme", CallerRole.CLIENT)
    with acting_for(caller):
        await preparer(llava_text, threads).build_prompt(TOKENS, DEFAULT_TENANT, "one")
    assert callers == [caller]
