"""Parses and answers completions of texts (https://platform.openai.com/docs/api-reference/completions)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_svc.answers import Ask, End, answer_events, whole_answers
from gateway_svc.apis.api import Context, event
from gateway_svc.apis.echo import ToldPrompt, check_adapter, told_prompt
from gateway_svc.apis.logprobs import completion_logprobs
from gateway_svc.apis.parsing.content import MAX_CHARACTERS, RemoteImage
from gateway_svc.apis.parsing.fields import EXTENSIONS, HONOURED, LABEL, Field, Fields
from gateway_svc.apis.parsing.sampling import MAX_ANSWERS, SAMPLING, num_answers, sampling_options
from gateway_svc.apis.usage import StreamedUsage, UsageOptions, chat_usage
from gateway_svc.errors import body_of, renamed
from lookonce.decoder_info import ModelInfo
from lookonce.errors import LookonceError
from lookonce.generation import Choice, GenerateOptions, Generation, TextPrompt, TokenLogprobs, TokenPrompt
from lookonce.images import ImageRef

COMPLETION_FIELDS: Mapping[str, Field] = {
    "model": Field("honoured", "The served name; any other one is `model_not_found`."),
    "prompt": Field(
        "honoured",
        "A text or a list of token ids, or a list of one of these; times n at most 16. Control tokens in a text count.",
    ),
    **SAMPLING,
    "max_tokens": Field("honoured", "Default: 16, as OpenAI's."),
    "logprobs": Field("honoured", "At most the decoder's max_logprobs."),
    "stream": HONOURED,
    "stream_options": Field("honoured", "`include_usage`; with it `continuous_usage_stats`, as vLLM has it."),
    "user": LABEL,
    "echo": Field(
        "honoured", "Also with logprobs, as evaluation harnesses ask for them, and with max_tokens 0. Not in a stream."
    ),
    "best_of": Field("honoured", "At least n, at most 16. Not above n in a stream, nor with echo."),
    "suffix": Field("refused", "Not offered.", ("",)),
    **EXTENSIONS,
}
_DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A parsed request for completions."""

    model: str
    # Texts, or ids of tokens.
    prompts: Sequence[str | Sequence[int]]
    options: GenerateOptions
    num_each: int
    # Number of alternatives for each token; None: no log-probabilities.
    num_top: int | None
    # Whether answers begin with the prompt.
    echoes: bool
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
        prompts = _prompts(fields)
        num_each = num_answers(fields)
        if not 1 <= len(prompts) * num_each <= MAX_ANSWERS:
            raise fields.wrong("prompt", f"prompts times n must be 1 to {MAX_ANSWERS}, got {len(prompts) * num_each}")
        if sum(map(len, prompts)) * num_each > MAX_CHARACTERS:
            raise fields.wrong("prompt", f"is too long; all answers together may have {MAX_CHARACTERS} characters")
        streams, echoes = fields.flag("stream") or False, fields.flag("echo") or False
        if streams and echoes:
            raise fields.wrong("echo", "is not for streams")
        best_of = fields.integer("best_of")
        if best_of is not None and not num_each <= best_of <= MAX_ANSWERS:
            raise fields.wrong("best_of", f"must be {num_each} to {MAX_ANSWERS}")
        if best_of is not None and best_of > num_each:
            if streams or echoes:
                raise fields.wrong("best_of", "cannot be above n in a stream, or with echo")
            options |= {"n": num_each, "best_of": best_of}
        if max_tokens == 0 and not echoes:
            raise fields.wrong("max_tokens", "must be at least 1 without echo")
        return cls(
            model=fields.needed("model", fields.text("model")),
            prompts=prompts,
            options=options,
            num_each=num_each,
            num_top=num_top,
            echoes=echoes,
            streams=streams,
            usage_options=UsageOptions.parse(fields, streams=streams),
        )

    @property
    def remote_images(self) -> Sequence[RemoteImage]:
        """Images that must be fetched; there are none in texts."""
        return ()

    async def ask(self, fetch: Callable[[str], Awaitable[ImageRef]], info: ModelInfo) -> Ask:
        """Returns the request for the decoder."""
        prompts = [TextPrompt(each) if isinstance(each, str) else TokenPrompt(each) for each in self.prompts]
        # The decoder chooses the best answers to a prompt, so it has to know of all of them.
        return Ask(prompts, self.options, 1 if "best_of" in self.options else self.num_each)

    async def whole(self, ask: Ask, context: Context) -> dict[str, Any]:
        """Returns a completion with all answers."""
        if self.echoes:
            return await self._echoed(ask, context)
        generations = await whole_answers(context.client, ask, context.request_id, context.timeout_s)
        answers: list[Generation | Choice] = []
        for generation in generations:
            answers += [generation, *generation.others]
        choices = [
            {
                "index": index,
                "text": answer.text,
                "logprobs": await self._logprobs(answer.logprobs, answer.text, 0, context),
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(answers)
        ]
        usage = chat_usage([generation.usage for generation in generations], ask.num_each)
        return {**_head(context), "choices": choices, "usage": usage}

    async def _echoed(self, ask: Ask, context: Context) -> dict[str, Any]:
        """Returns a completion whose answers begin with their prompts."""
        adapter = ask.options.get("adapter")
        prompts = [await told_prompt(context, prompt, self.num_top, adapter) for prompt in self.prompts]
        if self.options["max_tokens"] == 0:
            if adapter is not None and not any(prompt.is_computed for prompt in prompts):
                # No call has named it, and the gateway's list of adapters may be old.
                await check_adapter(context.client, adapter, context.timeout_s)
            choices = [_choice(index, prompts[index // self.num_each], None) for index in range(ask.num_answers)]
            return {**_head(context), "choices": choices, "usage": chat_usage([each.usage for each in prompts], 1)}
        generations = await whole_answers(context.client, ask, context.request_id, context.timeout_s)
        choices = []
        for index, generation in enumerate(generations):
            prompt = prompts[index // self.num_each]
            more = await self._logprobs(generation.logprobs, generation.text, len(prompt.text), context)
            choices.append(_choice(index, prompt.followed_by(generation.text, more), generation.finish_reason))
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
        return renamed(
            error, dict.fromkeys(("text.text", "text", "tokens.token_ids", "token_ids", "continuations"), "prompt")
        )

    def failure(self, error: LookonceError) -> bytes:
        """Returns the event that ends an answer with an error."""
        return event(body_of(error))

    async def _logprobs(
        self, tokens: Sequence[TokenLogprobs], text: str, first_offset: int, context: Context
    ) -> dict[str, list[Any]] | None:
        if self.num_top is None or not tokens:
            return None
        return await completion_logprobs(tokens, text, first_offset, context.token_texts)


def _prompts(fields: Fields) -> list[str | list[int]]:
    """Returns texts and lists of token ids. Raises InvalidParameterError."""
    value = fields.raw("prompt")
    if value is None:
        raise fields.wrong("prompt", "is missing")
    many = value if isinstance(value, list) and not (value and isinstance(value[0], int)) else [value]
    for each in many:
        is_ids = isinstance(each, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in each)
        if not isinstance(each, str) and not (each and is_ids):
            raise fields.wrong("prompt", "must be a text or a list of token ids, or a list of one of these")
    return many


def _choice(index: int, prompt: ToldPrompt, finish_reason: str | None) -> dict[str, Any]:
    """Returns an answer that begins with its prompt. Without further tokens, it ends by its length."""
    return {
        "index": index,
        "text": prompt.text,
        "logprobs": prompt.logprobs,
        "finish_reason": finish_reason or "length",
    }


def _head(context: Context) -> dict[str, Any]:
    return {
        "id": f"cmpl-{context.request_id}",
        "object": "text_completion",
        "created": context.created,
        "model": context.model,
    }
