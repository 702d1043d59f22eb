"""Prompts that a completion repeats, with the log-probability of each token behind those before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway_svc.apis.api import Context
from gateway_svc.apis.logprobs import completion_logprobs
from lookonce import AsyncClient
from lookonce.errors import InvalidParameterError
from lookonce.generation import TextPrompt, TokenPrompt, Usage

# Alternatives for a token whose number nobody has given: a program compares it with the likeliest one.
_LEAST_TOP = 1


@dataclass(frozen=True, slots=True)
class ToldPrompt:
    """A prompt, maybe with an answer behind it."""

    text: str
    # The lists of the older form; None: not asked for.
    logprobs: dict[str, list[Any]] | None
    usage: Usage
    # Whether the model has computed it: it computes nothing for a single token, nor without log-probabilities.
    is_computed: bool

    def followed_by(self, text: str, logprobs: Mapping[str, list[Any]] | None) -> ToldPrompt:
        """Returns the prompt with an answer behind it."""
        joined = self.logprobs
        if joined is not None and logprobs is not None:
            joined = {name: [*values, *logprobs[name]] for name, values in joined.items()}
        return replace(self, text=self.text + text, logprobs=joined)


async def told_prompt(
    context: Context, prompt: str | Sequence[int], num_top: int | None, adapter: str | None
) -> ToldPrompt:
    """Returns a prompt as a completion repeats it. Computes it if log-probabilities are asked for.

    `adapter` None: the base model.
    """
    client, timeout_s = context.client, context.timeout_s
    token_ids = list(prompt) if not isinstance(prompt, str) else None
    if token_ids is None:
        token_ids = list((await client.tokenize(TextPrompt(str(prompt)), timeout_s=timeout_s)).token_ids)
    text = prompt if isinstance(prompt, str) else await client.detokenize(token_ids, timeout_s=timeout_s)
    usage = Usage(len(token_ids), 0, 0, 0, 0, 0, 0, queue_time_s=0.0, time_to_first_token_s=0.0)
    if num_top is None:
        return ToldPrompt(text, None, usage, is_computed=False)
    (first,) = await context.token_texts(token_ids[:1])
    logprobs: dict[str, list[Any]] = {
        "tokens": [first],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }
    if len(token_ids) > 1:
        scoring = await client.score(
            TokenPrompt(token_ids[:1]),
            [token_ids[1:]],
            logprobs=max(_LEAST_TOP, num_top),
            adapter=adapter,
            timeout_s=timeout_s,
        )
        (score,) = scoring.scores
        start = len(first) if text.startswith(first) else 0
        rest = await completion_logprobs(score.logprobs, text[start:], start, context.token_texts)
        logprobs = {name: [*values, *rest[name]] for name, values in logprobs.items()}
    return ToldPrompt(text, logprobs, usage, is_computed=len(token_ids) > 1)


async def check_adapter(client: AsyncClient, adapter: str, timeout_s: float) -> None:
    """Raises InvalidParameterError for an adapter that no decoder serves any more. Asks the decoders."""
    info = await client.model_info(fresh=True, timeout_s=timeout_s)
    if adapter not in info.adapters:
        raise InvalidParameterError("adapter", f"{adapter[:64]!r} is not served")
