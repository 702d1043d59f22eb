"""A tiny Muse Spark: Muse Glimmer's tower, and text layers with experts of their own width whose outputs are normed."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import transformers

from tests import tiny_models
from tests.tiny_families import muse_glimmer, parts

NAME = "muse_spark"
EXPERT_WIDTH = 48
_TOKENS = {"image_token_id": "<|patch|>", "video_token_id": "<|video|>", "audio_token_id": "<|audio|>"}
# Norms that multiply by 1 + weight; others multiply by the weight.
_CENTRED = ("layernorm.weight", "expert_norm.weight")


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Builds a model of four text layers: the second is dense, and the others choose two of four experts."""
    tokenizer = muse_glimmer.new_tokenizer([*_TOKENS.values(), "<|soft_audio_start|>", "<|soft_audio_end|>"])
    config = transformers.MuseSparkConfig(
        text_config=muse_glimmer.text_config(tokenizer) | _experts() | {"model_type": "muse_spark_text"},
        vision_config=muse_glimmer.vision_config(),
        audio_config=_audio_config(),
        **muse_glimmer.common_config(tokenizer, _TOKENS),
    )
    model = parts.random_model(transformers.MuseSparkForConditionalGeneration, config, tokenizer, seed)
    _redraw(model.model.language_model, seed)
    processor = parts.whole_processor(_processor_class(), muse_glimmer.image_processor(), tokenizer)
    return parts.save(folder, model, processor)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor, with torchvision, without the parts for videos and sound."""
    return parts.load(folder, _processor_class())


def _processor_class() -> Any:
    return parts.images_only(transformers.MuseSparkProcessor)


def _experts() -> dict[str, Any]:
    return {
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "moe_hidden_size": EXPERT_WIDTH,
        "routed_scaling_factor": 1.5,
        # With those of published folders, attention would be too sharp for bfloat16, and some changes too small to see.
        "qk_scale_factor": 2.0,
        "output_multiplier": 0.6,
        "final_logit_softcapping": 5.0,
        "residual_gate_temperature": 0.5,
        "post_norm_eps": 1e-3,
    }


def _audio_config() -> dict[str, Any]:
    return {
        "patch_sizes": [4, 4],
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "num_hidden_layers": 2,
        "out_hidden_size": tiny_models.HIDDEN_SIZE,
    }


def _redraw(text_model: Any, seed: int) -> None:
    """Draws the gates of residuals and the biases of the experts' scores, which would be near zero."""
    generator = torch.Generator().manual_seed(seed + 2)
    with torch.no_grad():
        for name, parameter in text_model.named_parameters():
            if name.endswith(_CENTRED):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith("residual_gate.gate"):
                # Experts add less than attention: in bfloat16, a token may get other ones.
                mean = 0.2 if "attention" in name else -0.4
                parameter.copy_(mean + 0.3 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in text_model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
