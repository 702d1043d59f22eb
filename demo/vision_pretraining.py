"""The first training stage: vision tower and projector learn to describe in every row the content of its grid cell.

The target of a row is the sum of the language model's embeddings of the words for colour, shape and place of the shape
in the cell; in an empty cell it is the embedding of the number of shapes. So the language model does not have to learn
to see while it learns to answer, and can begin by looking up and copying words.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from demo.data_parallel import Workers
from demo.model import GRID_SIDE, HIDDEN_SIZE
from demo.picture_pool import PicturePool
from demo.questions import NUMBER_WORDS
from demo.scenes import COLOURS, SCENE_GRID_SIDE, SHAPES, Scene, position_name

log = logging.getLogger(__name__)

_COLOUR_IDS: Final = {name: index + 1 for index, name in enumerate(COLOURS)}
_SHAPE_IDS: Final = {name: index + 1 for index, name in enumerate(SHAPES)}
# The shape is by far the slowest to learn, so its loss has the largest weight.
_LOSS_WEIGHTS: Final = {"colour": 1.0, "shape": 4.0, "cell": 1.0}
_DISTANCE_WEIGHT: Final = 4.0
_SHARPNESS: Final = 10.0
_LEARNING_RATE: Final = 2e-3
_MAX_SHAPES: Final = 3
# Patches never straddle grid cells: two by two make one.
_CELL_OF_AXIS: Final = torch.arange(GRID_SIDE) * SCENE_GRID_SIDE // GRID_SIDE
_CELL_OF_PATCH: Final = (_CELL_OF_AXIS[:, None] * SCENE_GRID_SIDE + _CELL_OF_AXIS).flatten()
# Rows of the background are as long as the sum of a shape's three words. The language model normalises every row, which
# would amplify the noise in shorter rows.
_BACKGROUND_LENGTH: Final = math.sqrt(3)


@dataclass(frozen=True, slots=True)
class PatchLabels:
    """Classes of the content of each patch's grid cell, for a batch of pictures. Class 0 is an empty cell."""

    colour: Tensor
    """int64 [n, 36]."""
    shape: Tensor
    """int64 [n, 36]."""
    cell: Tensor
    """Grid cell of the shape, 1 to 9; int64 [n, 36]."""
    count: Tensor
    """Number of shapes, minus one; int64 [n]."""


class WordRows:
    """The target rows of tower and projector, as sums of words that are all scaled by one factor.

    During training the words have about the length of a layer norm's output; `scale` converts them to embeddings.
    """

    def __init__(self, embeddings: Tensor, tokenizer: PreTrainedTokenizerFast) -> None:
        cells = [position_name(row, column) for row in range(3) for column in range(3)]
        background = torch.zeros(1, HIDDEN_SIZE)
        names = {"colour": tuple(COLOURS), "shape": SHAPES, "cell": cells}
        tables = {key: _word_vectors(each, embeddings, tokenizer) for key, each in names.items()}
        self.scale = (tables["colour"].norm(dim=1).mean() / (0.6 * math.sqrt(HIDDEN_SIZE))).item()
        self._words = {key: torch.cat([background, table / self.scale]) for key, table in tables.items()}
        numbers = _word_vectors(NUMBER_WORDS[1 : _MAX_SHAPES + 1], embeddings, tokenizer)
        self._numbers = numbers / self.scale * _BACKGROUND_LENGTH

    def wanted(self, labels: PatchLabels) -> Tensor:
        """Returns the target rows [n, 36, hidden_size] for the labels."""
        on_shape = sum(words[getattr(labels, name)] for name, words in self._words.items())
        is_background = (labels.colour == 0)[..., None]
        return torch.where(is_background, self._numbers[labels.count][:, None], on_shape)

    def loss(self, rows: Tensor, labels: PatchLabels) -> Tensor:
        """Returns the squared distance from the target rows plus the cross entropies of the words on shapes.

        The few patches on shapes have the same weight as the far more numerous patches of the background.
        """
        on_shape = labels.colour > 0
        weights = torch.where(on_shape, on_shape.numel() / on_shape.sum(), 1.0)
        distance = (rows - self.wanted(labels)).square().mean(dim=-1)
        total = _DISTANCE_WEIGHT * (distance * weights).sum() / weights.sum()
        for name, loss_weight in _LOSS_WEIGHTS.items():
            total = total + loss_weight * nn.functional.cross_entropy(
                self._likeness(rows[on_shape], name), getattr(labels, name)[on_shape] - 1
            )
        return total

    def accuracy(self, rows: Tensor, labels: PatchLabels) -> dict[str, float]:
        """Returns the shares of patches whose row is closest to the right word, on shapes and on the background."""
        on_shape = labels.colour > 0
        shares = {
            name: (self._likeness(rows[on_shape], name).argmax(-1) + 1 == getattr(labels, name)[on_shape])
            for name in self._words
        }
        counts = labels.count[:, None].expand_as(on_shape)[~on_shape]
        shares["count"] = (rows[~on_shape] @ self._numbers.T).argmax(-1) == counts
        return {name: right.float().mean().item() for name, right in shares.items()}

    def _likeness(self, rows: Tensor, name: str) -> Tensor:
        words = self._words[name][1:]
        return _SHARPNESS * (rows @ words.T) / (0.36 * HIDDEN_SIZE)


def _word_vectors(names: Sequence[str], embeddings: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Returns the mean embedding of each name's tokens, [len(names), hidden_size].

    A word inside a sentence and the same word at its start are different tokens; the vector lies between them.
    """
    spellings = [[tokenizer.encode(each, add_special_tokens=False) for each in (name, f" {name}")] for name in names]
    return torch.stack([torch.stack([embeddings[ids].mean(dim=0) for ids in both]).mean(dim=0) for both in spellings])


def label_patches(scenes: list[Scene]) -> PatchLabels:
    """Labels every patch with the shape in its grid cell."""
    cells = torch.zeros(3, len(scenes), SCENE_GRID_SIDE**2, dtype=torch.long)
    for index, scene in enumerate(scenes):
        for placed in scene.shapes:
            cell = placed.row * SCENE_GRID_SIDE + placed.column
            cells[:, index, cell] = torch.tensor([_COLOUR_IDS[placed.colour], _SHAPE_IDS[placed.shape], cell + 1])
    count = torch.tensor([len(scene.shapes) - 1 for scene in scenes])
    colour, shape, cell = cells[..., _CELL_OF_PATCH]
    return PatchLabels(colour, shape, cell, count)


def pretrain_vision(
    model: LlavaForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    pool: PicturePool,
    num_steps: int,
    batch_size: int,
    generator: torch.Generator,
    workers: Workers,
) -> None:
    """Trains tower and projector in place for `num_steps`, each on `batch_size` pictures of this worker's pool."""
    target = WordRows(model.get_input_embeddings().weight.detach(), tokenizer)
    projector = model.model.multi_modal_projector
    parameters = [*model.model.vision_tower.parameters(), *projector.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_cosine(step, 60, num_steps, 0.05))
    for step in range(num_steps):
        indices = torch.randint(len(pool.scenes), (batch_size,), generator=generator).tolist()
        labels = label_patches([pool.scenes[index] for index in indices])
        rows = torch.stack(model.get_image_features(pool.normalised(indices)).pooler_output)
        loss = target.loss(rows, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        workers.average_gradients(parameters)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49 or step == num_steps - 1:
            shown = " ".join(f"{name} {share:.3f}" for name, share in target.accuracy(rows.detach(), labels).items())
            log.info("vision step %d/%d loss %.3f: %s", step + 1, num_steps, loss.item(), shown)
    with torch.no_grad():
        projector.linear_2.weight.mul_(target.scale)
        projector.linear_2.bias.mul_(target.scale)


def compute_image_rows(model: LlavaForConditionalGeneration, pool: PicturePool, batch_size: int = 250) -> Tensor:
    """Computes the embedding rows of all pictures of the pool, float32 [num_pictures, 36, hidden_size]."""
    with torch.inference_mode():
        batches = torch.arange(len(pool.scenes)).split(batch_size)
        features = [model.get_image_features(pool.normalised(each.tolist())).pooler_output for each in batches]
    return torch.cat([torch.stack(list(each)) for each in features]).clone()


def warm_cosine(step: int, num_warmup_steps: int, num_steps: int, final: float) -> float:
    """Returns the learning-rate factor: linear from 0 to 1 over the warm-up, then half a cosine down to `final`."""
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    done = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
