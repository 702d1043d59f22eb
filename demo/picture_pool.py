"""A pool of training pictures at the model's input size, drawn once and kept as bytes.

The pixels equal those of the saved image processor before it normalises; train.py checks that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from demo.model import IMAGE_SIDE_PX
from demo.scenes import NUM_TRAINING_SEEDS, Scene, random_scene, render


@dataclass(frozen=True, slots=True)
class PicturePool:
    """Scenes and their pixels, in the same order."""

    scenes: list[Scene]
    pixels: torch.Tensor
    """uint8 [num_pictures, 3, 96, 96]."""

    def normalised(self, indices: list[int]) -> torch.Tensor:
        """Returns pixel values in [-1, 1], float32 [len(indices), 3, 96, 96], as the processor computes them."""
        return (self.pixels[indices].float() / 255 - 0.5) / 0.5


def draw_pool(num_pictures: int, first_seed: int) -> PicturePool:
    """Draws the scenes of `num_pictures` consecutive training seeds. Raises ValueError beyond the training seeds."""
    if first_seed + num_pictures > NUM_TRAINING_SEEDS:
        raise ValueError(f"training seeds end at {NUM_TRAINING_SEEDS}, asked for {first_seed + num_pictures}")
    scenes = [random_scene(seed) for seed in range(first_seed, first_seed + num_pictures)]
    pixels = np.empty((num_pictures, 3, IMAGE_SIDE_PX, IMAGE_SIDE_PX), dtype=np.uint8)
    for index, scene in enumerate(scenes):
        picture = render(scene).resize((IMAGE_SIDE_PX, IMAGE_SIDE_PX), Image.Resampling.BICUBIC)
        pixels[index] = np.asarray(picture).transpose(2, 0, 1)
    return PicturePool(scenes, torch.from_numpy(pixels))
