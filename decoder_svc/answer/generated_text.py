"""Turns the engine's outputs of one request into the parts of an answer. Knows neither engine nor wire."""

from __future__ import annotations

from dataclasses import dataclass, field

from decoder_svc.answer.detokenizer import IncrementalDecoder, StopFilter
from decoder_svc.prompt.sampling_check import CheckedSampling
from decoder_svc.prompt.text_tokenizer import TextTokenizer
from decoder_svc.scheduling.request_output import FinishReason, RequestOutput, TokenLogprobs
from decoder_svc.tools.answer_reader import AnswerForm, AnswerReader, ReadAnswer
from decoder_svc.tools.tool import CallDelta


@dataclass(frozen=True, slots=True)
class TextIncrement:
    """The part that one engine output adds to the answer."""

    # Text that can no longer change; may be "" although there are tokens.
    text: str
    # All ids of the output, or those up to the one that ended the answer's text.
    token_ids: tuple[int, ...]
    # One per token if the request asks for them, else empty.
    logprobs: tuple[TokenLogprobs, ...]
    # Set in the last increment only.
    finish_reason: FinishReason | None
    reasoning: str = ""
    # New calls of functions, and new text of their arguments.
    calls: tuple[CallDelta, ...] = ()
    # Whether the answer has ended by itself and calls functions.
    ends_with_calls: bool = False


class GeneratedText:
    """The growing answer of one request."""

    def __init__(self, tokenizer: TextTokenizer, sampling: CheckedSampling, form: AnswerForm | None = None) -> None:
        """`form` says which parts the answer may have; None: text only."""
        self._decoder = IncrementalDecoder(tokenizer, () if form is None else form.shown_token_ids)
        self._filter = StopFilter(sampling.stop_strings)
        self._reader = None if form is None else AnswerReader(form)
        self._stop_token_ids = sampling.params.stop_token_ids
        # Stop strings in the text of the first tokens are ignored, as the end of sequence is.
        self._min_tokens = sampling.params.min_tokens
        # Tokens of the answer so far, and how many of them were accepted draft tokens.
        self.num_tokens = 0
        self.num_accepted_drafts = 0

    def push(self, output: RequestOutput) -> TextIncrement:
        """Adds the next output and returns its increment. Nothing may follow an increment with a finish reason."""
        parts = _Parts()
        for index, token_id in enumerate(output.token_ids):
            is_last = output.finish_reason is not None and index + 1 == len(output.token_ids)
            is_stop_token = is_last and output.finish_reason is FinishReason.STOP and token_id in self._stop_token_ids
            text = "" if is_stop_token else self._decoder.push(token_id)
            self.num_tokens += 1
            self.num_accepted_drafts += index < len(output.was_draft) and output.was_draft[index]
            if self._is_ended_by(text, parts):
                return self._increment(parts, output, index + 1, FinishReason.STOP)
        reason = output.finish_reason
        if reason is not None:
            if self._is_ended_by(self._decoder.flush(), parts):
                reason = FinishReason.STOP
            else:
                self._read(self._filter.flush(), parts)
        return self._increment(parts, output, len(output.token_ids), reason)

    def _is_ended_by(self, text: str, parts: _Parts) -> bool:
        """Adds text to the parts. Returns whether a stop string or an only call ends the answer there."""
        if self.num_tokens <= self._min_tokens:
            # The filter sees no text of the first tokens and holds none.
            return self._read(text, parts)
        filtered = self._filter.push(text)
        parts.is_cut = filtered.is_stopped
        return self._read(filtered.text, parts) or filtered.is_stopped

    def _read(self, text: str, parts: _Parts) -> bool:
        if self._reader is None:
            parts.texts.append(text)
            return False
        read = self._reader.push(text)
        parts.add(read)
        return read.is_ended

    @property
    def _has_calls(self) -> bool:
        return self._reader is not None and self._reader.has_calls

    def _increment(
        self, parts: _Parts, output: RequestOutput, num_tokens: int, reason: FinishReason | None
    ) -> TextIncrement:
        if reason is not None and self._reader is not None and not parts.is_ended:
            parts.add(self._reader.flush())
        return TextIncrement(
            "".join(parts.texts),
            output.token_ids[:num_tokens],
            output.logprobs[:num_tokens],
            reason,
            "".join(parts.reasoning),
            tuple(parts.calls),
            ends_with_calls=reason is FinishReason.STOP and not parts.is_cut and self._has_calls,
        )


@dataclass(slots=True)
class _Parts:
    """The parts of one increment."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)
    # Whether the answer ends behind its only call.
    is_ended: bool = False
    # Whether a stop string has cut it off.
    is_cut: bool = False

    def add(self, read: ReadAnswer) -> None:
        """Adds what was read of the answer."""
        self.texts.append(read.text)
        self.reasoning.append(read.reasoning)
        self.calls += read.calls
        self.is_ended = self.is_ended or read.is_ended
