"""The adapters of a runner, and the tokens of the present step to which each applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from decoder_svc.runner.adapters.low_rank import LowRank, TextLinears, read_low_ranks
from decoder_svc.scheduling.scheduler_output import ScheduledChunk
from lookonce.model.adapter_folder import AdapterFolder


class AdaptedTokens(NamedTuple):
    """Tokens [start, stop) of a step that have one adapter."""

    start: int
    stop: int
    # Index in the table.
    slot: int


class AdaptedModel(Protocol):
    """The language model's layers, to which adapters are added."""

    def prepare(self, low_ranks: Mapping[str, LowRank]) -> Any:
        """Converts an adapter for `place`. `low_ranks` has what it adds to each linear layer, by the layer's name.

        Any thread may call it. It changes nothing.
        """
        ...

    def place(self, slot: int, prepared: Any) -> None:
        """Adds what was prepared, or nothing any more if it is None."""


class ReadAdapter(NamedTuple):
    """An adapter that was read, for `AdapterTable.add`."""

    # The result of AdaptedModel.prepare.
    prepared: Any
    # Its matrices, for the other ranks of a split model; None without them.
    low_ranks: Mapping[str, LowRank] | None


# Tells the other ranks of a split model which adapter has a slot from now on; None: none.
TellRanks = Callable[[int, Mapping[str, LowRank] | None], None]


class AdapterTable:
    """Adapters by their fingerprints. `begin_step` says which tokens they apply to until it is called again."""

    def __init__(self, model: Any) -> None:
        """`model` is the language half as transformers loads it."""
        self._linears = TextLinears(model)
        self._model: AdaptedModel | None = None
        self._tell_ranks: TellRanks | None = None
        self._slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        # The adapted tokens of the step, in their order.
        self.tokens: tuple[AdaptedTokens, ...] = ()

    def __contains__(self, fingerprint: str) -> bool:
        return fingerprint in self._slots

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The adapters that are there."""
        return tuple(self._slots)

    @property
    def is_applied(self) -> bool:
        """Whether the model's layers add what adapters say."""
        return self._model is not None

    def apply_to(self, model: AdaptedModel) -> None:
        """Sets the layers to which adapters are added. Call it before the first `add`."""
        self._model = model

    def lead(self, tell: TellRanks) -> None:
        """Has every change told to the other ranks of a split model. Call it before the first `read`."""
        self._tell_ranks = tell

    def read(self, folder: AdapterFolder) -> ReadAdapter:
        """Reads an adapter for `add`. Any thread may call it. Raises ModelFolderError if it does not fit the model."""
        assert self._model is not None, "apply_to comes first"
        low_ranks = read_low_ranks(folder, self._linears)
        return ReadAdapter(self._model.prepare(low_ranks), None if self._tell_ranks is None else low_ranks)

    def add(self, fingerprint: str, read: ReadAdapter) -> None:
        """Adds an adapter that was read, unless one with the same content is there."""
        if fingerprint in self._slots:
            return
        assert self._model is not None, "apply_to comes first"
        slot = self._free_slots[-1] if self._free_slots else len(self._slots)
        self._model.place(slot, read.prepared)
        if self._tell_ranks is not None:
            self._tell_ranks(slot, read.low_ranks)
        self._slots[fingerprint] = slot
        if self._free_slots:
            self._free_slots.pop()

    def drop(self, fingerprint: str) -> None:
        """Frees an adapter, which no request in the batch may have."""
        slot = self._slots.pop(fingerprint, None)
        if slot is not None:
            assert self._model is not None, "apply_to comes first"
            self._free_slots.append(slot)
            self._model.place(slot, None)
            if self._tell_ranks is not None:
                self._tell_ranks(slot, None)

    def follow(self, slot: int, low_ranks: Mapping[str, LowRank] | None) -> None:
        """Does on another rank what rank 0 tells."""
        assert self._model is not None, "apply_to comes first"
        self._model.place(slot, None if low_ranks is None else self._model.prepare(low_ranks))

    def begin_step(self, chunks: Sequence[ScheduledChunk], adapters: Sequence[str | None]) -> None:
        """Takes the chunks of a pass, and the fingerprint of each one's adapter; None: the base model."""
        found: list[AdaptedTokens] = []
        stop = 0
        for chunk, adapter in zip(chunks, adapters, strict=True):
            start, stop = stop, stop + chunk.num_tokens
            if adapter is None:
                continue
            slot = self._slots[adapter]
            if found and found[-1].stop == start and found[-1].slot == slot:
                start = found.pop().start
            found.append(AdaptedTokens(start, stop, slot))
        self.tokens = tuple(found)


class AdaptedModules:
    """transformers' modules, whose linear layers are wrapped where an adapter adds something (AdaptedModel)."""

    def __init__(self, text_model: Any, table: AdapterTable, device: torch.device, dtype: torch.dtype) -> None:
        self._text_model = text_model
        self._table = table
        self._device, self._dtype = device, dtype
        self._wrapped: dict[str, AdaptedLinear] = {}

    def prepare(self, low_ranks: Mapping[str, LowRank]) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns the matrices on the device, in the model's element type."""
        return {
            name: (low.down.to(self._device, self._dtype), low.up.to(self._device, self._dtype))
            for name, low in low_ranks.items()
        }

    def place(self, slot: int, prepared: dict[str, tuple[Tensor, Tensor]] | None) -> None:
        """Wraps the layers that have no wrapping yet. Wrappings stay when an adapter goes."""
        for layer in self._wrapped.values():
            layer.low_ranks.pop(slot, None)
        for name, matrices in (prepared or {}).items():
            if name not in self._wrapped:
                parent, _, child = name.rpartition(".")
                owner = self._text_model.get_submodule(parent)
                self._wrapped[name] = AdaptedLinear(getattr(owner, child), self._table)
                setattr(owner, child, self._wrapped[name])
            self._wrapped[name].low_ranks[slot] = matrices


class AdaptedLinear(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A linear layer with what adapters add to it, for the tokens that have them."""

    def __init__(self, base: Any, table: AdapterTable) -> None:
        super().__init__()
        self.base = base
        self._table = table
        # Both matrices of each adapter that changes this layer, by its slot.
        self.low_ranks: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        """Takes and returns what the base layer does; tokens are the last dimension but one."""
        outputs: Tensor = self.base(inputs)
        for start, stop, slot in self._table.tokens:
            if slot in self.low_ranks:
                down, up = self.low_ranks[slot]
                outputs[..., start:stop, :] += inputs[..., start:stop, :] @ down.T @ up.T
        return outputs
