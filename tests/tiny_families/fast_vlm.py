"""Builds a tiny FastVLM folder: squares of 256 px, a row per 64 px square, a tower of convolutions and attention."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import transformers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "fast_vlm"
SIDE = 256
ROW_PIXELS = 64
# Channels of the tower's five stages. Rows have twice those of the last one.
CHANNELS = (16, 16, 32, 32, 32)
# All images of a message stand before its texts.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\n' + part['text'] }}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    tokenizer = tiny_models._tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"],
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        template=TEMPLATE,
    )
    config = transformers.FastVlmConfig(
        text_config=transformers.Qwen2Config(**tiny_models._text_config(tokenizer)),
        vision_config=transformers.TimmWrapperConfig(
            architecture="fastvit_mci3",
            model_args={"inference_mode": True, "layers": [1] * len(CHANNELS), "embed_dims": CHANNELS},
            hidden_size=2 * CHANNELS[-1],
            num_classes=0,
            label_names=[],
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    gains = {**parts.ATTENTIVE, "multi_modal_projector.linear_2": 0.15}
    model = parts.random_model(transformers.FastVlmForConditionalGeneration, config, tokenizer, seed, gains=gains)
    _finish(model.model.vision_tower, seed)
    images = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_mean=[0.0, 0.0, 0.0],
        image_std=[1.0, 1.0, 1.0],
    )
    whole = parts.whole_processor(transformers.LlavaProcessor, images, tokenizer, {"patch_size": ROW_PIXELS})
    return parts.save(folder, model, whole)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor, which resizes with PIL."""
    return parts.load(folder, transformers.LlavaProcessor)


def _finish(tower: Any, seed: int) -> None:
    """Draws the statistics of batch normalisation, and weights again with which rows depend on the image.

    Random convolutions lose contrast layer by layer, so they get a gain, and the biases become small beside it.
    """
    generator = torch.Generator().manual_seed(seed + 2)
    with torch.no_grad():
        for name, tensor in (*tower.named_parameters(), *tower.named_buffers()):
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("reparam_conv.weight"):
                tensor.mul_(1.6)
            elif name.endswith("bias"):
                tensor.mul_(0.3)
            elif name.endswith(("gamma", "norm.weight", "bn.weight")):
                tensor.copy_(1.0 + 0.1 * noise)
            elif name.endswith("running_mean"):
                tensor.copy_(0.1 * noise)
            elif name.endswith("running_var"):
                tensor.copy_(0.5 + 0.2 * noise.abs())
