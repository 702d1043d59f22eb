"""Builds a tiny Command A Vision folder: up to 4 tiles of 64 px and the whole image, 4 rows each, Cohere 2 text."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers

from tests import tiny_models
from tests.tiny_families import aya_vision, parts

NAME = "cohere2_vision"
TILE = 64
DOWNSAMPLE = 2
ROWS_PER_SIDE = 2
NAMED = {
    "image_token": "<|IMG_PATCH|>",
    "boi_token": "<|START_OF_IMG|>",
    "eoi_token": "<|END_OF_IMG|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}
_TURNS = ("<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>")
_ANSWER = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    tokenizer = parts.named_tokenizer(
        ["<PAD>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", *_TURNS, *_ANSWER, *NAMED.values()],
        NAMED,
        bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>",
        pad="<PAD>",
        template=aya_vision.TEMPLATE.replace("<image>", NAMED["image_token"]),
    )
    config = transformers.Cohere2VisionConfig(
        text_config=aya_vision.text_config(tokenizer),
        vision_config=parts.siglip_config(image_size=TILE, patch_size=TILE // (ROWS_PER_SIDE * DOWNSAMPLE)),
        image_token_id=tokenizer.convert_tokens_to_ids(NAMED["image_token"]),
        downsample_factor=DOWNSAMPLE,
        alignment_intermediate_size=2 * tiny_models.HIDDEN_SIZE,
        tie_word_embeddings=False,
    )
    model = parts.random_model(transformers.Cohere2VisionForConditionalGeneration, config, tokenizer, seed)
    return parts.save(folder, model, processor(tokenizer))


def processor(tokenizer: Any) -> Any:
    """Returns the whole processor; the patch size of its image processor is the number of rows on a tile's side."""
    from transformers.models.cohere2_vision.image_processing_cohere2_vision import Cohere2VisionImageProcessor

    images = Cohere2VisionImageProcessor(size={"height": TILE, "width": TILE}, max_patches=4, patch_size=ROWS_PER_SIDE)
    return parts.whole_processor(transformers.Cohere2VisionProcessor, images, tokenizer)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor of a folder that `build` wrote."""
    return parts.load(folder, transformers.Cohere2VisionProcessor)
