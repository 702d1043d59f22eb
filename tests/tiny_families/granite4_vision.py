"""A tiny Granite 4 Vision: SigLIP tower of 72 px squares, six feature levels, Granite's text model."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "granite4_vision"

_SIDE = 72
_PATCH = 12
_RATE = "1/2"
_PINPOINTS = [[72, 144], [144, 72], [144, 144], [216, 72], [72, 216]]
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start_of_role|>' + message['role'] + '<|end_of_role|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|end_of_text|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 9 rows for the whole image, then those of its tiles with a row after each line: up to 51."""
    special = ["<|end_of_text|>", "<|pad|>", "<|start_of_role|>", "<|end_of_role|>", "<image>"]
    tokenizer = tiny_models._tokenizer(special, bos=None, eos="<|end_of_text|>", pad="<|pad|>", template=_TEMPLATE)
    config = transformers.Granite4VisionConfig(
        vision_config=parts.siglip_config(image_size=_SIDE, patch_size=_PATCH),
        text_config=_text_config(tokenizer),
        qformer_config=_qformer_config(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=_PINPOINTS,
        vision_feature_select_strategy="full",
        downsample_rate=_RATE,
        # The default of `vision_feature_layer` is no layer that the model reads.
        deepstack_layer_map=[[-2, 4], [1, 0]],
        spatial_vision_layer=-1,
        spatial_target_layers=[1, 2, 3, 5],
        tie_word_embeddings=False,
    )
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": _SIDE},
        crop_size={"height": _SIDE, "width": _SIDE},
        image_grid_pinpoints=_PINPOINTS,
    )
    settings = {"patch_size": _PATCH, "vision_feature_select_strategy": "full", "downsample_rate": _RATE}
    processor = parts.whole_processor(transformers.Granite4VisionProcessor, images, tokenizer, settings)
    model = parts.random_model(
        transformers.Granite4VisionForConditionalGeneration,
        config,
        tokenizer,
        seed,
        gains=parts.ATTENTIVE | {"patch_embedding.weight": 3.0},
    )
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.Granite4VisionProcessor)


def _text_config(tokenizer: Any) -> Any:
    """Returns a configuration whose four multipliers are neither 1 nor what other models have."""
    return transformers.Granite4VisionTextConfig(
        **tiny_models._text_config(tokenizer)
        | {
            "num_hidden_layers": 6,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 4.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        }
    )


def _qformer_config() -> dict[str, Any]:
    return {
        "model_type": "blip_2_qformer",
        "num_hidden_layers": 1,
        "intermediate_size": 2 * tiny_models.HIDDEN_SIZE,
        "cross_attention_frequency": 1,
        "use_qformer_text_input": False,
    }
