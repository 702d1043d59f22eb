"""A tiny North Vision: Qwen3-VL's tower and levels, and text layers with a window, one of four without positions."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.cohere_compass.image_processing_pil_cohere_compass import CohereCompassImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts, qwen3_vl

NAME = "cohere_compass"

_SQUARE = 32 * 32
# Published ones have a window of 4,096 tokens.
_WINDOW = 12
_MARKERS = {
    "vision_start_token_id": "<|VISION_START|>",
    "vision_end_token_id": "<|VISION_END|>",
    "image_token_id": "<|IMAGE_PAD|>",
    "video_token_id": "<|VIDEO_PAD|>",
}
_START, _END = "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '" + _START + "<|' + message['role'].upper() + '_TOKEN|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|VISION_START|><|IMAGE_PAD|><|VISION_END|>' }}"
    "{% elif part['type'] == 'video' %}{{ '<|VISION_START|><|VIDEO_PAD|><|VISION_END|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '" + _END + "' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + _START + "<|ASSISTANT_TOKEN|>' }}{% endif %}"
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model with 4 to 36 rows of three feature levels each."""
    roles = [f"<|{role}_TOKEN|>" for role in ("SYSTEM", "USER", "ASSISTANT")]
    special = ["<PAD>", "<BOS_TOKEN>", _START, _END, *roles, *_MARKERS.values()]
    tokenizer = tiny_models._tokenizer(special, bos="<BOS_TOKEN>", eos=_END, pad="<PAD>", template=_TEMPLATE)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    config = transformers.CohereCompassConfig(
        text_config=tiny_models._text_config(tokenizer)
        | {
            "model_type": "cohere_compass_text",
            "num_hidden_layers": 4,
            "head_dim": 32,
            "sliding_window": _WINDOW,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
            "rope_parameters": {"sliding_attention": rope, "full_attention": None},
            "logit_scale": 0.25,
        },
        vision_config=qwen3_vl.vision_config(),
        tie_word_embeddings=False,
        **{field: tokenizer.convert_tokens_to_ids(token) for field, token in _MARKERS.items()},
    )
    images = CohereCompassImageProcessorPil(
        size={"shortest_edge": 4 * _SQUARE, "longest_edge": 36 * _SQUARE},
        patch_size=16,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    model = parts.random_model(
        transformers.CohereCompassForConditionalGeneration, config, tokenizer, seed, gains=parts.ATTENTIVE
    )
    return parts.save(folder, model, parts.whole_processor(_processor_class(), images, tokenizer))


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, _processor_class())


def _processor_class() -> Any:
    return parts.without_video(transformers.CohereCompassProcessor)
