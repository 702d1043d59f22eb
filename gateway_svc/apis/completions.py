"""Parses and answers completions of texts (https://platform.openai.com/docs/api-reference/completions)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_svc.answers import Ask, End, answer_events, whole_answers
from gateway_svc.apis.api import Context, event
from gateway_svc.apis.content import MAX_CHARACTERS, RemoteImage
from gateway_svc.apis.fields import EXTENSIONS, HONOURED, LABEL, Field, Fields
from gateway_svc.apis.logprobs import completion_logprobs
from gateway_svc.apis.sampling import MAX_ANSWERS, SAMPLING, num_answers, sampling_options
from gateway_svc.apis.usage import StreamedUsage, UsageOptions, chat_usage
from gateway_svc.errors import body_of, renamed
from lookonce.decoder_info import ModelInfo
from lookonce.errors import LookonceError
from lookonce.generation import GenerateOptions, TextPrompt, TokenLogprobs
from lookonce.images import ImageRef

COMPLETION_FIELDS: Mapping[str, Field] = {
    "model": Field("honoured", "The served name; any other one is `model_not_found`."),
    "prompt": Field(
        "honoured", "A text or a list of texts; times n at most 16. Control tokens in it count. Token ids are refused."
    ),
    **SAMPLING,
    "max_tokens": Field("honoured", "Default: 16, as OpenAI's."),
    "logprobs": Field("honoured", "At most the decoder's max_logprobs."),
    "stream": HONOURED,
    "stream_options": Field("honoured", "`include_usage`; with it `continuous_usage_stats`, as vLLM has it."),
    "user": LABEL,
    "echo": Field("refused", "Not offered yet.", (False,)),
    "best_of": Field("refused", "Not offered yet.", (1,)),
    "suffix": Field("refused", "Not offered.", ("",)),
    **EXTENSIONS,
}
_DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A parsed request for completions."""

    model: str
    prompts: Sequence[str]
    options: GenerateOptions
    num_each: int
    # Whether log-probabilities are asked for.
    has_logprobs: bool
    streams: bool
    usage_options: UsageOptions

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> CompletionRequest:
        """Raises InvalidParameterError for fields that are unknown, refused or of a wrong type."""
        fields = Fields.checked(values, COMPLETION_FIELDS)
        options = sampling_options(fields)
        max_tokens = fields.integer("max_tokens")
        options["max_tokens"] = _DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
        num_top = fields.integer("logprobs")
        if num_top is not None:
            options["logprobs"] = num_top
        prompts = fields.needed("prompt", fields.texts("prompt"))
        num_each = num_answers(fields)
        if not 1 <= len(prompts) * num_each <= MAX_ANSWERS:
            raise fields.wrong("prompt", f"prompts times n must be 1 to {MAX_ANSWERS}, got {len(prompts) * num_each}")
        if sum(map(len, prompts)) * num_each > MAX_CHARACTERS:
            raise fields.wrong("prompt", f"is too long; all answers together may have {MAX_CHARACTERS} characters")
        streams = fields.flag("stream") or False
        return cls(
            model=fields.needed("model", fields.text("model")),
            prompts=prompts,
            options=options,
            num_each=num_each,
            has_logprobs=num_top is not None,
            streams=streams,
            usage_options=UsageOptions.parse(fields, streams=streams),
        )

    @property
    def remote_images(self) -> Sequence[RemoteImage]:
        """Images that must be fetched; there are none in texts."""
        return ()

    async def ask(self, fetch: Callable[[str], Awaitable[ImageRef]], info: ModelInfo) -> Ask:
        """Returns the request for the decoder."""
        return Ask([TextPrompt(prompt) for prompt in self.prompts], self.options, self.num_each)

    async def whole(self, ask: Ask, context: Context) -> dict[str, Any]:
        """Returns a completion with all answers."""
        generations = await whole_answers(context.client, ask, context.request_id, context.timeout_s)
        choices = [
            {
                "index": index,
                "text": generation.text,
                "logprobs": await self._logprobs(generation.logprobs, generation.text, 0, context),
                "finish_reason": generation.finish_reason,
            }
            for index, generation in enumerate(generations)
        ]
        usage = chat_usage([generation.usage for generation in generations], ask.num_each)
        return {**_head(context), "choices": choices, "usage": usage}

    async def events(self, ask: Ask, context: Context) -> AsyncGenerator[bytes]:
        """Yields parts of a completion, and `[DONE]`."""
        head = _head(context)
        usage = StreamedUsage(ask, self.usage_options)
        lengths = [0] * ask.num_answers
        async for one in answer_events(context.client, ask, context.request_id, context.timeout_s):
            usage.note(one)
            text, finish_reason = "", None
            if isinstance(one, End):
                finish_reason = one.generation.finish_reason
            else:
                text = one.delta.text
            logprobs = await self._logprobs(one.logprobs, text, lengths[one.index], context)
            lengths[one.index] += len(text)
            choice = {"index": one.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
            yield event({**head, **usage.beside_choices, "choices": [choice]})
        if self.usage_options.is_included:
            yield event({**head, "choices": [], "usage": usage.total})
        yield b"data: [DONE]\n\n"

    def renamed(self, error: LookonceError) -> LookonceError:
        """Returns an error of the decoder with the name of the request's field."""
        return renamed(error, {"text.text": "prompt", "text": "prompt"})

    def failure(self, error: LookonceError) -> bytes:
        """Returns the event that ends an answer with an error."""
        return event(body_of(error))

    async def _logprobs(
        self, tokens: Sequence[TokenLogprobs], text: str, first_offset: int, context: Context
    ) -> dict[str, list[Any]] | None:
        if not self.has_logprobs or not tokens:
            return None
        return await completion_logprobs(tokens, text, first_offset, context.token_texts)


def _head(context: Context) -> dict[str, Any]:
    return {
        "id": f"cmpl-{context.request_id}",
        "object": "text_completion",
        "created": context.created,
        "model": context.model,
    }
