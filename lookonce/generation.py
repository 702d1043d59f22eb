"""The SDK's input and output types of a generation. Plain data, no protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

from lookonce.images import ImageLike, NonTextImage
from lookonce.videos import Video

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
FinishReason: TypeAlias = Literal["stop", "length", "abort", "tool_calls"]
TokenLogprobs: TypeAlias = "tuple[tuple[int, float], ...]"
"""Token ids and natural-log probabilities at the place of one generated token: the sampled one, then the likeliest."""
Part: TypeAlias = "str | Video | NonTextImage"
"""One part of a message. A str is text; images are references, bytes, pathlib.Paths, open files or PIL images."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. The program calls it, and answers with a message of the role "tool"."""

    # 1 to 64 characters of [A-Za-z0-9._-].
    name: str
    # Text by which the model decides when and how to call it.
    description: str = ""
    # JSON schema of the arguments, which are an object: as text or as objects of Python. None: no arguments.
    parameters: str | Mapping[str, object] | None = None
    # Whether arguments must conform to the schema even where the model is free to call the function or not.
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function by the model."""

    # The message with the result has the same id.
    id: str
    name: str
    # A JSON object, as text. The model wrote it, so it may be none, unless the call was forced.
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a call, as it is generated."""

    # Index of the call in its answer.
    index: int
    # New text of the arguments.
    arguments: str
    # Id and function of the call; set in its first part.
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """The part that one message of a stream adds to an answer."""

    text: str = ""
    # Reasoning of the model before its answer, if it marks that.
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: Role
    # A text, or a list of texts, images and videos in reading order. May be empty beside `tool_calls`.
    content: str | Sequence[Part] = ""
    # With the role "assistant": calls of functions, and the reasoning before the answer.
    tool_calls: Sequence[ToolCall] = ()
    reasoning: str = ""
    # With the role "tool": the id of the call whose result this is.
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt as the model reads it, without the chat template: the way for models that have none.

    Control tokens that are spelled in the text count, so keep other people's texts out of it.
    """

    # Text in which `model_info().image_placeholder` stands once for each image.
    text: str
    # Images in the order of their placeholders.
    images: Sequence[ImageLike] = ()


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as token ids, as the model reads them."""

    # Ids with one placeholder token for each image, or with all tokens of every image as `tokenize` returns them.
    token_ids: Sequence[int]
    # Images in the order of their placeholders.
    images: Sequence[ImageLike] = ()


Prompt: TypeAlias = "str | TextPrompt | TokenPrompt | Sequence[Message]"
"""A question, a prompt as text or as token ids, or a chat."""


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of `score` and `embed`, and of `generate` and `stream` as well. None is the default."""

    # The request: its id in logs, its priority (lower runs earlier), isolation in the prefix cache, LoRA adapter.
    request_id: str | None
    priority: int | None
    cache_salt: str | None
    adapter: str | None
    bypass_prefix_cache: bool | None
    # Functions that the model may call, and whether it does: "auto", "none", "required", or the name of one. With
    # `parallel_tool_calls` False an answer ends behind its first call. For chats only.
    tools: Sequence[Tool] | None
    tool_choice: str | None
    parallel_tool_calls: bool | None
    # Arguments of the model's chat template, such as {"enable_thinking": False}.
    template_arguments: Mapping[str, object] | None
    # Deadline of the whole call, seconds; math.inf: none. Default: the client's.
    timeout_s: float | None


class GenerateOptions(RequestOptions, total=False):
    """Keyword arguments of `generate` and `stream`. An option that is left out, or None, takes its default."""

    # Sampling; decoder_service.proto defines the ranges. temperature 0 is greedy.
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    # Length of the answer and stop conditions.
    max_tokens: int | None
    min_tokens: int | None
    stop: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    # Number of alternatives per token with their log-probabilities; 0 is the sampled token only.
    logprobs: int | None
    # The same for each token of the prompt but the first. `generate` only.
    prompt_logprobs: int | None
    # Structured output, at most one: a JSON schema, as text or as objects of Python; a regular expression; a grammar in
    # Lark's notation; any JSON object; or one of some texts.
    json_schema: str | Mapping[str, object] | None
    regex: str | None
    grammar: str | None
    json_object: bool | None
    choice: Sequence[str] | None
    # Number of answers, 1 to 128; `stream` gives one. They share the prompt, and answer i has the seed `seed` + i. With
    # `best_of`, so many are generated, and the `n` likeliest ones are returned.
    n: int | None
    best_of: int | None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token accounting of one generation."""

    # All prompt tokens, image tokens included.
    prompt_tokens: int
    # Prompt tokens served from the prefix KV cache.
    cached_prompt_tokens: int
    # Image tokens of the prompt: the sum of the next three, unless the request was aborted before it was computed.
    image_tokens: int
    # Image tokens of images that an encoder computed for this request; each encode is counted by one request.
    encoded_image_tokens: int
    # Image tokens whose row was there already, or came from an encode that another request counts.
    cached_image_tokens: int
    # Image tokens that needed no row, because their KV was cached.
    skipped_image_tokens: int
    # Generated tokens.
    completion_tokens: int
    # Time from arrival to the first step that computed a token of the request.
    queue_time_s: float
    # Time from arrival to the first generated token.
    time_to_first_token_s: float
    # Generated tokens that cost no step of their own: from prompt lookup, a constraint, or continuations of `score`.
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several answers to one prompt."""

    text: str
    # Generated token ids.
    token_ids: tuple[int, ...]
    # "stop": end of sequence or a stop string; "length": max_tokens; "tool_calls": by itself, with calls of functions;
    # "abort": aborted.
    finish_reason: FinishReason
    # Entry i belongs to token_ids[i]; empty unless asked for.
    logprobs: tuple[TokenLogprobs, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    # Reasoning of the model before its answer, if it marks that.
    reasoning: str = ""

    @property
    def message(self) -> Message:
        """The answer as a message for the next turn."""
        return Message("assistant", self.text, tool_calls=self.tool_calls, reasoning=self.reasoning)


@dataclass(frozen=True, slots=True)
class Generation:
    """The finished answer of a `generate` or `stream` call."""

    text: str
    # Generated token ids.
    token_ids: tuple[int, ...]
    # "stop": end of sequence or a stop string; "length": max_tokens; "tool_calls": by itself, with calls of functions;
    # "abort": aborted.
    finish_reason: FinishReason
    usage: Usage
    # The request's id, for logs and AbortRequest.
    request_id: str
    # Per generated token (token id, natural-log probability), the sampled one first; empty unless asked for.
    logprobs: tuple[TokenLogprobs, ...] = ()
    # The same for each token of the prompt but the first; empty unless asked for, and for tokens of images.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # The answers behind this one, if more than one was asked for. `usage` counts the prompt once and all their tokens.
    others: tuple[Choice, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    # Reasoning of the model before its answer, if it marks that.
    reasoning: str = ""

    @property
    def message(self) -> Message:
        """The answer as a message for the next turn."""
        return Message("assistant", self.text, tool_calls=self.tool_calls, reasoning=self.reasoning)


Pooling: TypeAlias = Literal["last", "mean"]


@dataclass(frozen=True, slots=True)
class PromptEmbedding:
    """The answer of an `embed` call."""

    # It has as many numbers as the language model's hidden size.
    embedding: tuple[float, ...]
    usage: Usage
    # The request's id, for logs and AbortRequest.
    request_id: str


@dataclass(frozen=True, slots=True)
class Score:
    """The likelihood of one continuation of a prompt."""

    # Natural logarithm of its probability: the sum of `token_logprobs`.
    logprob: float
    # Ids of its tokens.
    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    # Whether greedy decoding would write this continuation.
    is_greedy: bool
    # Entry i belongs to token_ids[i]; empty unless asked for.
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Scoring:
    """The answer of a `score` call."""

    # One per continuation, in order.
    scores: tuple[Score, ...]
    # The prompt counts once; the tokens of all continuations are `completion_tokens`.
    usage: Usage
    # The request's id, for logs and AbortRequest.
    request_id: str
