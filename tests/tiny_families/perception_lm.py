"""Builds a tiny Perception LM folder: tiles of 56 px, 4 rows each, after a thumbnail; a tower with a class row."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import transformers

from tests import tiny_models
from tests.tiny_families import parts

NAME = "perception_lm"
TILE = 56
PATCH = 14
POOLING = 2
MAX_TILES = 6
SPECIAL = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|image|>", "<|video|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
# All images of a message stand before its videos, and those before its texts.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<|image|>' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<|video|>' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] | trim }}{% endfor %}"
    "{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    tokenizer = parts.named_tokenizer(
        SPECIAL,
        {"image_token": "<|image|>", "video_token": "<|video|>"},
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        pad="<|end_of_text|>",
        template=TEMPLATE,
    )
    config = transformers.PerceptionLMConfig(
        text_config=transformers.LlamaConfig(
            **tiny_models._text_config(tokenizer), rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}
        ),
        vision_config=transformers.TimmWrapperConfig(
            architecture="vit_pe_core_large_patch14_336",
            model_args={
                "depth": tiny_models.NUM_LAYERS,
                "embed_dim": tiny_models.HIDDEN_SIZE,
                "global_pool": "",
                "img_size": [TILE, TILE],
                "init_values": 0.1,
                "ref_feat_shape": [TILE // PATCH, TILE // PATCH],
                "use_post_transformer_norm": False,
            },
            num_classes=0,
            label_names=[],
        ),
        projector_pooling_ratio=POOLING,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
        tie_word_embeddings=False,
    )
    model = parts.random_model(
        transformers.PerceptionLMForConditionalGeneration, config, tokenizer, seed, gains=parts.ATTENTIVE
    )
    _finish(model.model.vision_tower, seed)
    return parts.save(folder, model, processor(tokenizer))


def processor(tokenizer: Any) -> Any:
    """Returns the whole processor, without a video processor."""
    from transformers.models.perception_lm.image_processing_perception_lm import PerceptionLMImageProcessor

    images = PerceptionLMImageProcessor(tile_size=TILE, max_num_tiles=MAX_TILES, size={"height": TILE, "width": TILE})
    settings = {"patch_size": PATCH, "pooling_ratio": POOLING}
    return parts.whole_processor(_processor_class(), images, tokenizer, settings)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor, without a video processor."""
    return parts.load(folder, _processor_class())


def _processor_class() -> Any:
    """Returns a processor that joins the tiles of several images, as the model does.

    transformers' own joins the pixels of images only if all of them have the same number of tiles.
    """
    from transformers.image_utils import make_flat_list_of_images

    base = parts.without_video(transformers.PerceptionLMProcessor)

    def process_images(self: Any, images: Any, **arguments: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
        found = [base._process_images(self, [image], **arguments) for image in make_flat_list_of_images(images)]
        tiles = [processed["pixel_values"][0] for processed, _ in found]
        return {"pixel_values": torch.cat(tiles)[None]}, [text for _, texts in found for text in texts]

    return type(base.__name__, (base,), {"_process_images": process_images})


def _finish(tower: Any, seed: int) -> None:
    """Draws layer scales that let every layer count, and positions by which patches differ."""
    generator = torch.Generator().manual_seed(seed + 2)
    with torch.no_grad():
        for name, tensor in tower.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if "gamma" in name:
                tensor.copy_(0.5 + 0.1 * noise)
            elif name.endswith(("pos_embed", "cls_token")):
                tensor.copy_(0.5 * noise)
