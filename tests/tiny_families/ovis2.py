"""A tiny Ovis2: up to 4 tiles of 84 px and the whole image, 9 rows each, a visual vocabulary of 64, Qwen2 text."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "ovis2"
TILE = 84
# 6 × 6 patches, merged two by two.
ROWS_PER_TILE = 9
_NUM_WORDS, _NUM_MARKERS = 64, 5

_TEMPLATE = (
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    # `<image>` is not a token but text, which the processor replaces before tokenizing.
    markers = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
    tokenizer = tiny_models._tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<IMG_ATOM>", *markers],
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        template=_TEMPLATE,
    )
    config = transformers.Ovis2Config(
        vision_config=_vision_config(),
        text_config=transformers.Qwen2Config(
            **tiny_models._text_config(tokenizer), rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_ATOM>"),
        visual_indicator_token_ids=tokenizer.convert_tokens_to_ids(markers),
        vocab_size=len(tokenizer),
        hidden_size=tiny_models.HIDDEN_SIZE,
        tie_word_embeddings=False,
    )
    model = parts.random_model(
        transformers.Ovis2ForConditionalGeneration,
        config,
        tokenizer,
        seed,
        # Sharp mixtures of words that differ as much as the text's.
        gains=parts.ATTENTIVE | {"head_norm.weight": 3.0, "visual_embeddings_table": 8.0},
    )
    images = Ovis2ImageProcessorPil(size={"height": TILE, "width": TILE}, crop_to_patches=True, max_patches=4)
    settings = {"image_seq_length": ROWS_PER_TILE}
    return parts.save(folder, model, parts.whole_processor(transformers.Ovis2Processor, images, tokenizer, settings))


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.Ovis2Processor)


def _vision_config() -> dict[str, Any]:
    return {
        "hidden_size": tiny_models.HIDDEN_SIZE,
        "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
        "num_hidden_layers": tiny_models.NUM_LAYERS,
        "num_attention_heads": 4,
        "image_size": TILE,
        "patch_size": 14,
        "vocab_size": _NUM_WORDS + _NUM_MARKERS,
        "hidden_stride": 2,
        "num_visual_indicator_tokens": _NUM_MARKERS,
    }
