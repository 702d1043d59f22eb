"""Forward passes of the language half, from token ids or embeddings to logits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoder_svc.runner.attention import AttentionBackend, forward_context
from decoder_svc.runner.graphs.chunk_table import ChunkInputs
from decoder_svc.runner.graphs.decode_table import DecodeInputs
from decoder_svc.runner.shared_keys import computing_only
from decoder_svc.runner.step_metadata import recorded_metadata
from lookonce.model.half_model import text_child
from lookonce.model.structure.fixed_embeddings import FixedEmbeddings


@dataclass(frozen=True)
class _Computed:
    """The output of a base model as the wrappers of all families read it."""

    # [1, num_tokens, hidden_size]
    last_hidden_state: Tensor

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        """Caches, hidden states of other layers and features of images are not there."""
        if name.startswith("__"):
            raise AttributeError(name)


@dataclass(frozen=True)
class LanguagePass:
    """A model with its attention backend. Positions are `[num_axes, num_tokens]` everywhere."""

    model: Any
    backend: AttentionBackend
    # Feature levels beyond the embeddings.
    num_levels: int
    # Maps `has_row` and levels to the language model's arguments for them.
    level_arguments: Callable[[Tensor, Sequence[Tensor]], Mapping[str, Any]]
    # Reshapes positions for the model.
    model_positions: Callable[[Tensor], Tensor]
    # Ids of tokens that the model sends to the experts of images; None for a model without such experts.
    image_expert_ids: Tensor | None = None
    # Ids of tokens that count as padding where they have no row, and where layers look tokens up; None: layers look
    # nothing up.
    padded_input_ids: Tensor | None = None
    # Embeddings of tokens that are not looked up in the table; None: all are.
    fixed_embeddings: FixedEmbeddings | None = None
    # Whether late layers that read the keys of others may compute only the sampled tokens.
    can_narrow: bool = False
    # Whether the layers and the head are called without the model around them; see `wraps_nothing`.
    is_direct: bool = False

    @functools.cached_property
    def _text_model(self) -> Any:
        return getattr(self.model.model, text_child(self.model))

    @functools.cached_property
    def takes_ids(self) -> bool:
        """Whether `logits_of_ids` can be called."""
        looks_tokens_up = getattr(self._text_model, "looks_tokens_up", False)
        return self.is_direct and self.fixed_embeddings is None and looks_tokens_up

    @functools.cached_property
    def _has_head(self) -> bool:
        return getattr(self._text_model, "has_head", False)

    def logits_of_ids(self, token_ids: Tensor, positions: Tensor, sampled: Tensor | None) -> Tensor:
        """Returns what `logits` does for the embeddings of these tokens, none of which has a row of an image."""
        logits: Tensor = self._text_model.logits(positions, sampled, token_ids=token_ids)
        return logits

    def look_up(self, token_ids: Tensor) -> Tensor:
        """Returns the embeddings of tokens, `[num_tokens, hidden_size]`."""
        table = self.model.get_input_embeddings()
        # Placeholder ids may lie outside the table; their embeddings are overwritten anyway.
        embeddings: Tensor = table(self._known(token_ids).clamp(max=table.num_embeddings - 1))
        return embeddings if self.fixed_embeddings is None else self.fixed_embeddings(token_ids, embeddings)

    def _known(self, token_ids: Tensor) -> Tensor:
        """Returns the ids with padding where the model looks up a placeholder of images, videos or sound as such.

        A prompt of tokens may have such a token without an image, and an answer may contain one.
        """
        if self.padded_input_ids is None or not len(self.padded_input_ids):
            return token_ids
        padding = self._text_model.config.pad_token_id
        return token_ids.masked_fill(torch.isin(token_ids, self.padded_input_ids), padding)

    def look_up_rows(self, token_ids: Tensor) -> Tensor:
        """Returns the same with zeros for the further levels, `[num_tokens, row_elements]`."""
        looked_up = self.look_up(token_ids)
        if not self.num_levels:
            return looked_up
        return F.pad(looked_up, (0, self.num_levels * looked_up.shape[1]))

    def split_levels(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Returns the embeddings, and one tensor per further level."""
        if not self.num_levels:
            return (rows,)
        parts: tuple[Tensor, ...] = rows.split(rows.shape[1] // (1 + self.num_levels), dim=1)
        return parts

    def logits(
        self,
        embeddings: Tensor,
        positions: Tensor,
        sampled: Tensor | None,
        token_ids: Tensor | None = None,
        *,
        needs_all_tokens: bool = False,
    ) -> Tensor:
        """Returns the logits of the sampled tokens, or of all tokens, `[num_rows, vocab]`.

        A model with experts of images, or with per-layer inputs, needs `token_ids`. With `needs_all_tokens`, all layers
        compute all tokens, and the language model's output can be kept by a hook.
        """
        if self.is_direct and self._has_head and not needs_all_tokens:
            from_stack: Tensor = self._text_model.logits(positions, sampled, embeddings=embeddings)
            return from_stack
        arguments = self._arguments(embeddings, positions)
        if self.is_direct:
            hidden = self._text_model(**arguments).last_hidden_state[0]
            direct: Tensor = self.model.lm_head(hidden if sampled is None else hidden[sampled])
            return direct
        if self.padded_input_ids is not None:
            assert token_ids is not None, "per-layer inputs are looked up by token"
            self._add_layer_inputs(arguments, token_ids)
            narrowed = sampled if self.can_narrow and not needs_all_tokens else None
            with computing_only(self._text_model, narrowed) as narrowing:
                hidden = self._text_model(**arguments).last_hidden_state[0]
            return self.logits_of(hidden if sampled is None else narrowing.wanted(hidden, sampled))
        if token_ids is not None and self.image_expert_ids is not None:
            arguments["moe_mm_token_type_ids"] = torch.isin(token_ids, self.image_expert_ids)[None]
        if sampled is not None and not _can_select(type(self.model).forward):
            return self.logits_of(self.model.model(**arguments).last_hidden_state[0, sampled])
        kept = {} if sampled is None else {"logits_to_keep": sampled}
        # Call the whole wrapper, not `lm_head`: some models scale or soft-cap their logits in it.
        logits: Tensor = self.model(**arguments, **kept).logits[0]
        return logits

    def _add_layer_inputs(self, arguments: dict[str, Any], token_ids: Tensor) -> None:
        """Adds what the layers of a model look up by themselves, if they do."""
        if getattr(self._text_model, "hidden_size_per_layer_input", 0):
            arguments["per_layer_inputs"] = self._text_model.get_per_layer_inputs(self._known(token_ids)[None])

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Returns the logits of last hidden states `[num_rows, hidden_size]`, as `logits` computes them."""
        base = self.model.model
        # The whole wrapper is called, for the reason above. Its base model stands in for what is computed already.
        base.forward = lambda *_, **__: _Computed(hidden[None])
        try:
            logits: Tensor = self.model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            del base.forward
        return logits

    def logits_with_levels(
        self, embeddings: Tensor, positions: Tensor, sampled: Tensor, has_row: Tensor, levels: Sequence[Tensor]
    ) -> Tensor:
        """Runs a model that adds features of other tower layers to hidden states of its own layers (deepstack).

        `levels` have one row for each token that `has_row`, bool `[num_tokens]`, selects.
        """
        output = self._text_model(**self._arguments(embeddings, positions), **self.level_arguments(has_row, levels))
        return self.logits_of(output.last_hidden_state[0, sampled])

    @property
    def records_rows(self) -> bool:
        """Whether `compute_chunks` takes rows of images."""
        if not self.num_levels:
            return True
        # Models of transformers add levels to tokens that a mask selects, for which the host waits.
        return getattr(self._text_model, "adds_levels_without_waiting", False)

    def decode(self, inputs: DecodeInputs) -> Tensor:
        """Computes one new token per request. This pass is recorded as a graph."""
        for change in inputs.changes:
            change.apply()
        with forward_context(self.backend, recorded_metadata(inputs.step)):
            return self.logits(self.look_up(inputs.token_ids), inputs.positions, None, inputs.token_ids)

    def compute_chunks(self, inputs: ChunkInputs) -> Tensor:
        """Computes any division of tokens among requests. This pass is recorded as a graph."""
        for change in inputs.changes:
            change.apply()
        rows = torch.where(inputs.has_row[:, None], inputs.rows, self.look_up_rows(inputs.token_ids))
        embeddings, *levels = self.split_levels(rows)
        with forward_context(self.backend, recorded_metadata(inputs.step)):
            if not levels or not self.records_rows:
                return self.logits(embeddings, inputs.positions, inputs.sampled_indexes, inputs.token_ids)
            # The number of image tokens is not fixed, so every token counts as one. Levels of others are zeros.
            is_any = torch.ones_like(inputs.has_row)
            return self.logits_with_levels(embeddings, inputs.positions, inputs.sampled_indexes, is_any, levels)

    def _arguments(self, embeddings: Tensor, positions: Tensor) -> dict[str, Any]:
        return {
            "inputs_embeds": embeddings[None],
            "position_ids": self.model_positions(positions),
            "attention_mask": None,
            "use_cache": False,
        }


def wraps_nothing(language: LanguagePass, num_axes: int, device: torch.device) -> bool:
    """Whether a model only hands its arguments to a stack of layers of ours, and the result to its head.

    Then calling both without the model gives the same logits, and saves 0.25 ms of each step: the forward functions of
    transformers' models are wrapped several times. Found out by calls with random numbers, whose layers only note their
    arguments. Models that scale or cap logits, or change embeddings, give others.
    """
    model = language.model
    text_model = getattr(model.model, text_child(model))
    is_plain = language.padded_input_ids is None and language.image_expert_ids is None
    if not (is_plain and getattr(text_model, "takes_embeddings_alone", False) and _can_select(type(model).forward)):
        return False
    generator = torch.Generator().manual_seed(0)
    size = model.config.get_text_config().hidden_size
    for num_tokens in (1, 3):
        embeddings, hidden = (
            torch.randn(num_tokens, size, generator=generator).to(device, model.dtype) for _ in range(2)
        )
        positions = torch.arange(5, 5 + num_tokens, device=device).expand(num_axes, -1)
        sampled = torch.tensor([0, num_tokens - 1], device=device)
        noted: list[dict[str, Any]] = []
        text_model.forward = functools.partial(_note, noted, _Computed(hidden[None]))
        try:
            arguments = language._arguments(embeddings, positions)
            found = model(**arguments, logits_to_keep=sampled).logits[0]
        finally:
            del text_model.forward
        is_same = (
            len(noted) == 1
            and all(_is_equal(noted[0].get(name), arguments[name]) for name in ("inputs_embeds", "position_ids"))
            and all(noted[0].get(name) is None for name in ("visual_pos_masks", "deepstack_visual_embeds"))
        )
        if not (is_same and torch.equal(found, model.lm_head(hidden[sampled]))):
            return False
    return True


def _note(noted: list[dict[str, Any]], output: _Computed, **arguments: Any) -> _Computed:
    noted.append(arguments)
    return output


def _is_equal(found: Any, wanted: Tensor) -> bool:
    return isinstance(found, Tensor) and found.shape == wanted.shape and torch.equal(found, wanted)


@functools.cache
def _can_select(forward: Any) -> bool:
    """Whether a wrapper's `forward` can compute the logits of some tokens only; otherwise it ignores that argument."""
    return "logits_to_keep" in inspect.signature(forward).parameters
