"""Turns the engine's outputs of one request into text, ids and log probabilities. Knows neither engine nor wire."""

from __future__ import annotations

from dataclasses import dataclass

from decoder_svc.answer.detokenizer import IncrementalDecoder, StopFilter
from decoder_svc.prompt.sampling_check import CheckedSampling
from decoder_svc.prompt.text_tokenizer import TextTokenizer
from decoder_svc.scheduling.request_output import FinishReason, RequestOutput, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TextIncrement:
    """The part that one engine output adds to the answer."""

    # Text that can no longer change; may be "" although there are tokens.
    text: str
    # All ids of the output, or those up to the one that completed a stop string.
    token_ids: tuple[int, ...]
    # One per token if the request asks for them, else empty.
    logprobs: tuple[TokenLogprobs, ...]
    # Set in the last increment only.
    finish_reason: FinishReason | None


class GeneratedText:
    """The growing answer of one request."""

    def __init__(self, tokenizer: TextTokenizer, sampling: CheckedSampling) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._filter = StopFilter(sampling.stop_strings)
        self._stop_token_ids = sampling.params.stop_token_ids
        # Stop strings in the text of the first tokens are ignored, as the end of sequence is.
        self._min_tokens = sampling.params.min_tokens
        # Tokens of the answer so far, and how many of them were accepted draft tokens.
        self.num_tokens = 0
        self.num_accepted_drafts = 0

    def push(self, output: RequestOutput) -> TextIncrement:
        """Adds the next output and returns its increment. Nothing may follow an increment with a finish reason."""
        pieces: list[str] = []
        for index, token_id in enumerate(output.token_ids):
            is_last = output.finish_reason is not None and index + 1 == len(output.token_ids)
            is_stop_token = is_last and output.finish_reason is FinishReason.STOP and token_id in self._stop_token_ids
            text = "" if is_stop_token else self._decoder.push(token_id)
            self.num_tokens += 1
            self.num_accepted_drafts += index < len(output.was_draft) and output.was_draft[index]
            if self.num_tokens <= self._min_tokens:
                pieces.append(text)
                continue
            filtered = self._filter.push(text)
            pieces.append(filtered.text)
            if filtered.is_stopped:
                count = index + 1
                return TextIncrement(
                    "".join(pieces), output.token_ids[:count], output.logprobs[:count], FinishReason.STOP
                )
        reason = output.finish_reason
        if reason is not None:
            text = self._decoder.flush()
            if self.num_tokens <= self._min_tokens:
                # The filter has seen no text and holds none.
                return TextIncrement("".join([*pieces, text]), output.token_ids, output.logprobs, reason)
            rest = self._filter.push(text)
            pieces.append(rest.text)
            pieces.append("" if rest.is_stopped else self._filter.flush())
            reason = FinishReason.STOP if rest.is_stopped else reason
        return TextIncrement("".join(pieces), output.token_ids, output.logprobs, reason)
