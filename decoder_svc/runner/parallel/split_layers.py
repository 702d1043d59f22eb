"""The modules of a model of which a rank has a part. Each takes and returns what the whole module does.

The scheme is Megatron's (arXiv:1909.08053, section 3): a product by columns, whose outputs stay where they are, is
followed by one by rows, whose outputs are summed over the ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from decoder_svc.runner.parallel.rank_group import RankGroup
from lookonce.model.empty_weights import empty_weights
from lookonce.model.kernels.quantized_experts import Expert, ExpertWeights, QuantizedExperts
from lookonce.model.kernels.quantized_weight import QuantizedLinear, QuantizedWeight, Weight, inputs_of, weight_of

Linear: TypeAlias = nn.Linear | QuantizedLinear


def column_part(linear: Linear, group: RankGroup) -> Linear:
    """Returns the layer that computes this rank's share of the outputs."""
    share = group.share(linear.out_features)
    return _linear(_outputs_of(weight_of(linear), share), None if linear.bias is None else linear.bias[share])


class GatheredColumns(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A linear layer of which each rank computes its share of the outputs, and all ranks get all of them."""

    def __init__(self, linear: Linear, group: RankGroup) -> None:
        super().__init__()
        self.part = column_part(linear, group)
        self.out_features = linear.out_features
        self._group = group

    def forward(self, inputs: Tensor) -> Tensor:
        """Takes `[…, in_features]` and returns `[…, out_features]`, the same on each rank."""
        return self._group.join(self.part(inputs), self.out_features)


class SplitHead(GatheredColumns):
    """The last layer, from hidden states to logits. Only rank 0 gets them."""

    @property
    def weight(self) -> Tensor:
        """The weights of this rank's share of the vocabulary."""
        return self.part.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Computes `[…, vocab]`; on other ranks than 0 it has no values."""
        return self._group.join_at_first(self.part(inputs), self.out_features)


class SplitRows(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A linear layer of which each rank has the weights of its share of the inputs."""

    def __init__(self, linear: Linear, group: RankGroup, *, takes_all: bool) -> None:
        """`takes_all`: the inputs are whole on each rank, and not only its share of them."""
        super().__init__()
        self._share = group.share(linear.in_features)
        self.part = _linear(_inputs_of(weight_of(linear), self._share), None)
        # Added once, after the sum.
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.clone(), requires_grad=False)
        self._group = group
        self._takes_all = takes_all

    def forward(self, inputs: Tensor) -> Tensor:
        """Takes `[…, in_features]` and returns `[…, out_features]`, the same on each rank."""
        total = self._group.sum(self.part(inputs[..., self._share] if self._takes_all else inputs))
        return total if self.bias is None else total + self.bias


class SplitEmbedding(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """An embedding table of which each rank has its share of the vocabulary."""

    def __init__(self, table: nn.Embedding, group: RankGroup) -> None:
        """Takes the table over, with what its own `forward` does behind the look-up, such as scaling."""
        super().__init__()
        self.num_embeddings = table.num_embeddings
        self.embedding_dim = table.embedding_dim
        self._share = group.share(table.num_embeddings)
        table.weight = nn.Parameter(table.weight[self._share].clone(), requires_grad=False)
        table.padding_idx = None
        self.part = table
        self._group = group

    @property
    def weight(self) -> Tensor:
        """The rows of this rank's share of the vocabulary."""
        return self.part.weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """Returns the embeddings of tokens, `[…, embedding_dim]`."""
        rows = token_ids - self._share.start
        num_rows = self._share.stop - self._share.start
        is_here = (rows >= 0) & (rows < num_rows)
        found: Tensor = self.part(rows.clamp(0, num_rows - 1))
        return self._group.sum(found.masked_fill(~is_here[..., None], 0))


class SummedExperts(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A module of experts of which each rank computes its share of the units of each expert."""

    def __init__(self, part: nn.Module, group: RankGroup) -> None:
        """`part` has this rank's share of the weights; codes are divided here."""
        super().__init__()
        if isinstance(part, QuantizedExperts):
            part.weights = _expert_part(part.weights, group)
        self.part = part
        self._group = group

    def forward(self, *tokens: Tensor) -> Tensor:
        """Takes the arguments of the whole module and returns its results, the same on each rank."""
        return self._group.sum(self.part(*tokens))


def _expert_part(weights: ExpertWeights, group: RankGroup) -> ExpertWeights:
    """Returns this rank's share of the units of each expert, divided when an expert is read."""
    share = group.share(weights.mlp_size)

    def read(number: int) -> Expert:
        first, last = weights.read(number)
        return tuple(_outputs_of(part, share) for part in first), _inputs_of(last, share)

    return replace(weights, mlp_size=share.stop - share.start, read=read)


def packed_part(weight: Tensor, group: RankGroup, dim: int) -> Tensor:
    """Returns this rank's share of each of two weights that lie one behind the other in a dimension."""
    first, second = weight.chunk(2, dim)
    return torch.cat([plain_part(first, group, dim), plain_part(second, group, dim)], dim)


def plain_part(weight: Tensor, group: RankGroup, dim: int) -> Tensor:
    """Returns this rank's share of a dimension, in memory of its own."""
    share = group.share(weight.shape[dim])
    return weight.narrow(dim, share.start, share.stop - share.start).clone(memory_format=torch.contiguous_format)


def _outputs_of(weight: Weight, share: slice) -> Weight:
    return weight[share] if isinstance(weight, Tensor) else weight[torch.arange(share.start, share.stop)]


def _inputs_of(weight: Weight, share: slice) -> Weight:
    return weight[:, share] if isinstance(weight, Tensor) else inputs_of(weight, share)


def _linear(weight: Weight, bias: Tensor | None) -> Linear:
    if isinstance(weight, QuantizedWeight):
        return QuantizedLinear(weight, None if bias is None else bias.clone())
    with empty_weights():
        part = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    part.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format), requires_grad=False)
    part.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)
    return part
