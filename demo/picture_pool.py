"""A pool of training pictures at the model's input size, drawn once and kept as bytes.

The pixels are what the saved image processor produces before it normalises; train.py checks that they are equal.
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
    """Scenes and their pixels, by the same index."""

    scenes: list[Scene]
    pixels: torch.Tensor
    """uint8 [num_pictures, 3, 96, 96]."""

    def normalised(self, indices: list[int]) -> torch.Tensor:
        """Pixel values in [-1, 1] as float32 [len(indices), 3, 96, 96], as the processor gives them."""
        return (self.pixels[indices].float() / 255 - 0.5) / 0.5


def draw_pool(num_pictures: int, first_seed: int) -> PicturePool:
    """Draw the scenes of `num_pictures` consecutive training seeds; raises ValueError beyond the training seeds."""
    if first_seed + num_pictures > NUM_TRAINING_SEEDS:
        raise ValueError(f"training seeds end at {NUM_TRAINING_SEEDS}, asked for {first_seed + num_pictures}")
    scenes = [random_scene(seed) for seed in range(first_seed, first_seed + num_pictures)]
    pixels = np.empty((num_pictures, 3, IMAGE_SIDE_PX, IMAGE_SIDE_PX), dtype=np.uint8)
    for index, scene in enumerate(scenes):
        picture = render(scene).resize((IMAGE_SIDE_PX, IMAGE_SIDE_PX), Image.Resampling.BICUBIC)
        pixels[index] = np.asarray(picture).transpose(2, 0, 1)
    return PicturePool(scenes, torch.from_numpy(pixels))
