"""First training stage: the vision tower and projector learn to name what lies under each patch.

Linear heads read colour, shape and grid cell from every embedding row, and the count from their mean; they are thrown
away afterwards. It saves the language model from learning to see and to read at the same time.
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
from demo.model import GRID_SIDE, HIDDEN_SIZE, NUM_ROWS
from demo.picture_pool import PicturePool
from demo.scenes import COLOURS, SHAPES, Scene, position_name

log = logging.getLogger(__name__)

_COLOUR_IDS: Final = {name: index + 1 for index, name in enumerate(COLOURS)}
_SHAPE_IDS: Final = {name: index + 1 for index, name in enumerate(SHAPES)}
# The shape is by far the slowest to learn.
_LOSS_WEIGHTS: Final = {"colour": 1.0, "shape": 4.0, "cell": 1.0, "is_center": 1.0}
_LEARNING_RATE: Final = 2e-3
_MAX_SHAPES: Final = 3


@dataclass(frozen=True, slots=True)
class PatchLabels:
    """What lies under each patch of a batch of pictures; class 0 is the background."""

    colour: Tensor
    """int64 [n, 64]."""
    shape: Tensor
    """int64 [n, 64]."""
    cell: Tensor
    """Grid cell of the shape, 1 to 9; int64 [n, 64]."""
    is_center: Tensor
    """1 on the patch that holds the shape's centre; int64 [n, 64]."""
    count: Tensor
    """Number of shapes, minus one; int64 [n]."""


class WordHead(nn.Module):  # type: ignore[misc]
    """Reads a class from embedding rows by their likeness to the language model's own embeddings of its name.

    So the rows come to speak the language model's words, and answering starts out as copying.
    """

    def __init__(self, names: Sequence[str], embeddings: nn.Parameter, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self._embeddings = [embeddings]
        self._mix = torch.zeros(len(names) + 1, embeddings.shape[0])
        for index, name in enumerate(names):
            # A word within a sentence and the same word at its start are different tokens.
            for spelling in (name, f" {name}"):
                ids = tokenizer.encode(spelling, add_special_tokens=False)
                self._mix[index + 1, ids] += 1 / len(ids)
        self.scale = nn.Parameter(torch.tensor(10.0))
        self.bias = nn.Parameter(torch.zeros(len(names) + 1))

    def forward(self, rows: Tensor) -> Tensor:
        """Logits [..., 1 + number of names] of rows [..., hidden_size]; class 0 is the background."""
        return self.scale * (rows @ (self._mix @ self._embeddings[0]).T) + self.bias


class PatchHeads:
    """The throw-away read-outs of embedding rows [n, 64, hidden_size]."""

    def __init__(self, embeddings: nn.Parameter, tokenizer: PreTrainedTokenizerFast) -> None:
        cells = [position_name(row, column) for row in range(3) for column in range(3)]
        names = {"colour": tuple(COLOURS), "shape": SHAPES, "cell": cells}
        self._by_patch = nn.ModuleDict({key: WordHead(each, embeddings, tokenizer) for key, each in names.items()})
        self._by_patch["is_center"] = nn.Linear(HIDDEN_SIZE, 2)
        self._count = nn.Linear(HIDDEN_SIZE, _MAX_SHAPES)

    def parameters(self) -> list[nn.Parameter]:
        """All weights of the heads themselves, for the optimizer."""
        return [*self._by_patch.parameters(), *self._count.parameters()]

    def loss(self, rows: Tensor, labels: PatchLabels) -> Tensor:
        """Sum of the cross entropies; shape patches weigh as much as the far more numerous background patches."""
        foreground = labels.colour.flatten() > 0
        weights = torch.where(foreground, foreground.numel() / foreground.sum(), 1.0)
        total = nn.functional.cross_entropy(self._count(rows.mean(dim=1)), labels.count)
        for name, loss_weight in _LOSS_WEIGHTS.items():
            target = getattr(labels, name).flatten()
            each = nn.functional.cross_entropy(self._by_patch[name](rows.flatten(0, 1)), target, reduction="none")
            total = total + loss_weight * (each * weights).sum() / weights.sum()
        return total

    def accuracy(self, rows: Tensor, labels: PatchLabels) -> dict[str, float]:
        """Share of right classes on shape patches, and of right counts."""
        on_shape = labels.colour > 0
        with torch.no_grad():
            shares = {
                name: (head(rows).argmax(-1) == getattr(labels, name))[on_shape].float().mean().item()
                for name, head in self._by_patch.items()
            }
            shares["count"] = (self._count(rows.mean(dim=1)).argmax(-1) == labels.count).float().mean().item()
        return shares


def label_patches(scenes: list[Scene]) -> PatchLabels:
    """Labels from the scenes' geometry: a patch belongs to the shape whose radius reaches the patch's centre."""
    labels = torch.zeros(3, len(scenes), NUM_ROWS, dtype=torch.long)
    is_center = torch.zeros(len(scenes), NUM_ROWS, dtype=torch.long)
    centers = (torch.arange(GRID_SIDE) + 0.5) / GRID_SIDE
    patch_y, patch_x = (axis.flatten() for axis in torch.meshgrid(centers, centers, indexing="ij"))
    for index, scene in enumerate(scenes):
        smaller_px = min(scene.width_px, scene.height_px)
        for placed in scene.shapes:
            radius_x = placed.radius * smaller_px / 3 / scene.width_px
            radius_y = placed.radius * smaller_px / 3 / scene.height_px
            distance = torch.hypot((patch_x - placed.center_x) / radius_x, (patch_y - placed.center_y) / radius_y)
            under = distance < 0.8
            middle = int(placed.center_y * GRID_SIDE) * GRID_SIDE + int(placed.center_x * GRID_SIDE)
            under[middle] = True
            cell = placed.row * 3 + placed.column + 1
            ids = torch.tensor([_COLOUR_IDS[placed.colour], _SHAPE_IDS[placed.shape], cell])
            labels[:, index, under] = ids[:, None]
            is_center[index, middle] = 1
    count = torch.tensor([len(scene.shapes) - 1 for scene in scenes])
    return PatchLabels(labels[0], labels[1], labels[2], is_center, count)


def pretrain_vision(
    model: LlavaForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    pool: PicturePool,
    num_steps: int,
    batch_size: int,
    generator: torch.Generator,
    workers: Workers,
) -> None:
    """Train tower and projector in place for `num_steps` on `batch_size` pictures of this worker's pool each."""
    embeddings = model.get_input_embeddings().weight
    heads = PatchHeads(embeddings, tokenizer)
    parameters = [
        embeddings,
        *model.model.vision_tower.parameters(),
        *model.model.multi_modal_projector.parameters(),
        *heads.parameters(),
    ]
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_cosine(step, 60, num_steps, 0.1))
    for step in range(num_steps):
        indices = torch.randint(len(pool.scenes), (batch_size,), generator=generator).tolist()
        labels = label_patches([pool.scenes[index] for index in indices])
        rows = torch.stack(model.get_image_features(pool.normalised(indices)).pooler_output)
        loss = heads.loss(rows, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        workers.average_gradients(parameters)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49 or step == num_steps - 1:
            shown = " ".join(f"{name} {share:.3f}" for name, share in heads.accuracy(rows.detach(), labels).items())
            log.info("vision step %d/%d loss %.3f: %s", step + 1, num_steps, loss.item(), shown)


def warm_cosine(step: int, num_warmup_steps: int, num_steps: int, final: float) -> float:
    """Learning-rate factor: linear from 0 to 1 over the warm-up, then half a cosine down to `final`."""
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    done = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
