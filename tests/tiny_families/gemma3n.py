"""Builds a tiny Gemma 3n folder: squares of 128 px, 16 rows each, and half the layers without keys of their own.

As in published folders, the last tokens of the vocabulary are those of images and of sound, which the language model's
table and its per-layer table do not have. The tower's depth is fixed, so its channels are few. The folder has an
encoder of sound, which is not used.
"""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import torch
import transformers
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "gemma3n"
SIDE = 128
ROWS_PER_SIDE = 4
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"] * 2
# Layers in which most units of the MLP are zero.
NUM_SPARSE = 2
# The channels of the tower's output.
TOWER_WIDTH = 2048
# Texts are trimmed; the assistant is called "model".
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image_soft_token>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Those of the text, of which the first two are the tables' own, and then those of images and of sound.
NAMED = {
    "boi_token": "<start_of_image>",
    "boa_token": "<start_of_audio>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
    "eoa_token": "<end_of_audio>",
    "audio_token": "<audio_soft_token>",
}
SPECIAL = (
    *("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    *("<start_of_image>", "<start_of_audio>"),
)


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    tokenizer = parts.named_tokenizer(SPECIAL, NAMED, bos="<bos>", eos="<eos>", pad="<pad>", template=TEMPLATE)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in NAMED.items()}
    first, first_of_sound = ids["eoi_token"], ids["eoa_token"]
    assert ids["image_token"] == first + 1 == first_of_sound - 1 == len(tokenizer) - 3, "they are the last"
    text = transformers.Gemma3nTextConfig(
        **parts.gemma_text_config(tokenizer)
        | {
            "num_hidden_layers": len(LAYER_TYPES),
            "layer_types": LAYER_TYPES,
            "sliding_window": 10,
            "num_kv_shared_layers": 3,
            "vocab_size_per_layer_input": first,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.6] * NUM_SPARSE + [0.0] * (len(LAYER_TYPES) - NUM_SPARSE),
        }
    )
    vision = transformers.Gemma3nVisionConfig(
        architecture="mobilenetv5_300m_enc",
        model_args={"channel_multiplier": 0.02, "msfa_output_resolution": ROWS_PER_SIDE},
        hidden_size=TOWER_WIDTH,
        vocab_offset=first,
        vocab_size=first_of_sound - first,
        num_classes=0,
        label_names=[],
    )
    audio = transformers.Gemma3nAudioConfig(
        vocab_offset=first_of_sound,
        vocab_size=len(tokenizer) - first_of_sound,
        hidden_size=32,
        conf_num_attention_heads=2,
        conf_num_hidden_layers=1,
    )
    config = transformers.Gemma3nConfig(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        vision_soft_tokens_per_image=ROWS_PER_SIDE**2,
        tie_word_embeddings=False,
        **{f"{name}_id": token_id for name, token_id in ids.items()},
    )
    model = parts.random_model(
        transformers.Gemma3nForConditionalGeneration,
        config,
        tokenizer,
        seed,
        ends=["<end_of_turn>"],
        gains={"self_attn.q_norm": 1.5, "self_attn.k_norm": 1.5},
    )
    _finish(model.model, seed)
    images = SiglipImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, image_mean=[0.5, 0.5, 0.5], image_std=[0.25, 0.25, 0.25]
    )
    settings = {"image_seq_length": ROWS_PER_SIDE**2, "audio_seq_length": 4}
    return tiny_models._save(folder, model, tokenizer, images, {"processor_class": "Gemma3nProcessor", **settings})


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor, which resizes with PIL."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    settings = json.loads((folder / "processor_config.json").read_text())
    settings.pop("processor_class")
    settings["feature_extractor"] = transformers.Gemma3nAudioFeatureExtractor()
    return parts.whole_processor(transformers.Gemma3nProcessor, images, tokenizer, settings)


def _finish(model: Any, seed: int) -> None:
    """Draws the tower's norms, and scales embeddings, which the model multiplies by √width."""
    generator = torch.Generator().manual_seed(seed + 2)
    text_model = model.language_model
    with torch.no_grad():
        text_model.embed_tokens.weight /= math.sqrt(text_model.config.hidden_size)
        text_model.embed_tokens_per_layer.weight /= math.sqrt(text_model.hidden_size_per_layer_input)
        for name, tensor in model.vision_tower.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith(("bn.weight", "bn1.weight", "bn2.weight", "norm.weight")):
                tensor.copy_(1.0 + 0.1 * noise)
            elif name.endswith("gamma"):
                # Random blocks make images alike, so each of the 84 adds little.
                tensor.copy_(0.2 + 0.02 * noise)
