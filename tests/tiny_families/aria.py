"""Builds a tiny Aria folder: 7 × 7 patches of 140 px, read by 20 queries, and text layers of four experts."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.aria.image_processing_pil_aria import AriaImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "aria"
# The processor accepts only two sizes, so patches are large.
SIDE, PATCH = 980, 140
ROWS_PER_IMAGE = 20

# ChatML with markers around an image.
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<fim_prefix><|img|><fim_suffix>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    tokenizer = parts.named_tokenizer(
        ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<fim_prefix>", "<fim_suffix>", "<|img|>"],
        {"image_token": "<|img|>"},
        bos="<s>",
        eos="<|im_end|>",
        pad="<unk>",
        template=_TEMPLATE,
    )
    config = transformers.AriaConfig(
        text_config=tiny_models._text_config(tokenizer)
        | {
            "model_type": "aria_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "intermediate_size": tiny_models.HIDDEN_SIZE,
            "moe_num_experts": 4,
            "moe_topk": 2,
            "moe_num_shared_experts": 1,
        },
        vision_config={
            "model_type": "idefics3_vision",
            "hidden_size": tiny_models.HIDDEN_SIZE,
            "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
            "num_hidden_layers": tiny_models.NUM_LAYERS,
            "num_attention_heads": 4,
            "image_size": SIDE,
            "patch_size": PATCH,
        },
        projector_patch_to_query_dict={(SIDE // PATCH) ** 2: ROWS_PER_IMAGE},
        image_token_index=tokenizer.convert_tokens_to_ids("<|img|>"),
        tie_word_embeddings=False,
    )
    model = parts.random_model(
        transformers.AriaForConditionalGeneration,
        config,
        tokenizer,
        seed,
        ends=["</s>"],
        gains=parts.ATTENTIVE | {"patch_embedding.weight": 3.0},
    )
    # The whole processor asks for its own size and for no tiles.
    images = AriaImageProcessorPil(max_image_size=SIDE // 2, split_image=True)
    settings = {"processor_class": "AriaProcessor", "size_conversion": {str(SIDE): ROWS_PER_IMAGE}}
    return tiny_models._save(folder, model, tokenizer, images, settings)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.AriaProcessor)
