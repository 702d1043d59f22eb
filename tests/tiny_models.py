"""Builds tiny fp32 Hugging Face folders for tests: real architectures, tokenizers trained here, random weights.

The weights are drawn with a gain, so that activations neither vanish nor explode and the greedy output depends on the
image and on every prompt token. With the library's own initialisation (std 0.02) every answer would be the same.
Each `build_…` writes one folder with config, safetensors, tokenizer, chat template and image processor, in the form of
published models. Nothing here needs torchvision.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
import random
import shutil
from typing import Any

import numpy as np
import PIL.Image
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

HIDDEN_SIZE = 64
NUM_LAYERS = 3
MAX_POSITIONS = 4096
# Vocabulary size that the tokenizers are trained to; the model has the tokenizer's.
VOCAB_SIZE = 1024

# Roles in capitals, content parts in order, images at their positions: the form of LLaVA-1.5's template.
_LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ eos_token if message['role'] == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# The same, but the template writes BOS and the tokenizer adds none.
_LLAVA_TEMPLATE_WITH_BOS = "{{ bos_token }}" + _LLAVA_TEMPLATE
# The part of a message after its role in the templates of Qwen's models, then the start of the answer.
QWEN_TURN = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# ChatML with vision markers around each image: the form of Qwen2-VL's template.
QWEN_TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}" + QWEN_TURN


def build_llava_clip(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """LLaVA with a CLIP tower: 56 px squares of 14 px patches, 16 rows per image, class row dropped, layer −2."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        projection_dim=HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        image_size=56,
        patch_size=14,
    )
    processor = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    return _build_llava(folder, vision, processor, seed, feature_layer=-2, strategy="default", bos_by_template=False)


def build_llava_siglip(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """LLaVA with a SigLIP tower: 64 px squares of 16 px patches, 16 rows per image, no class row, last layer."""
    vision = transformers.SiglipVisionConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        image_size=64,
        patch_size=16,
        vision_use_head=False,
    )
    processor = SiglipImageProcessorPil(size={"height": 64, "width": 64})
    return _build_llava(folder, vision, processor, seed, feature_layer=-1, strategy="full", bos_by_template=True)


def build_qwen2_vl(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Qwen2-VL: rows by size (one per 28 px square, 4 to 24 of them), three rotary axes, tied word embeddings off."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    special += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _tokenizer(special, bos=None, eos="<|im_end|>", pad="<|endoftext|>", template=QWEN_TEMPLATE)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in special}
    config = transformers.Qwen2VLConfig(
        text_config=_text_config(tokenizer)
        | {
            "model_type": "qwen2_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": NUM_LAYERS,
            "embed_dim": HIDDEN_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "mlp_ratio": 2,
            "num_heads": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 4 * 28 * 28, "longest_edge": 24 * 28 * 28})
    model = _random_model(transformers.Qwen2VLForConditionalGeneration, config, tokenizer, seed)
    return _save(folder, model, tokenizer, processor, {"processor_class": "Qwen2VLProcessor"})


BUILDERS = {"llava_clip": build_llava_clip, "llava_siglip": build_llava_siglip, "qwen2_vl": build_qwen2_vl}


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole Hugging Face processor of a folder on the PIL backend, without a video processor."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "qwen2_vl":
        return _ImagesOnlyQwen2VLProcessor(images, tokenizer, None, chat_template=tokenizer.chat_template)
    settings = json.loads((folder / "processor_config.json").read_text())
    settings.pop("processor_class", None)
    return transformers.LlavaProcessor(images, tokenizer, chat_template=tokenizer.chat_template, **settings)


def load_model(folder: pathlib.Path) -> Any:
    """Returns the whole Hugging Face model of a folder in float32, in evaluation mode."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def random_image(seed: int, width: int = 80, height: int = 60) -> PIL.Image.Image:
    """Returns an RGB image of coarse coloured noise that differs widely between seeds."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return PIL.Image.fromarray(noise).resize((width, height), PIL.Image.Resampling.BICUBIC)


class _ImagesOnlyQwen2VLProcessor(transformers.Qwen2VLProcessor):  # type: ignore[misc]
    """Qwen2-VL's processor without a video processor, which needs torchvision and is useless for images."""

    def check_argument_for_proper_class(self, argument_name: str, argument: object) -> object:
        """Accepts a missing video processor."""
        if argument is None:
            return None
        return super().check_argument_for_proper_class(argument_name, argument)


def _build_llava(
    folder: pathlib.Path,
    vision: Any,
    processor: Any,
    seed: int,
    *,
    feature_layer: int,
    strategy: str,
    bos_by_template: bool,
) -> pathlib.Path:
    template = _LLAVA_TEMPLATE_WITH_BOS if bos_by_template else _LLAVA_TEMPLATE
    special = ["<pad>", "<s>", "</s>", "<image>"]
    tokenizer = _tokenizer(special, bos="<s>", eos="</s>", pad="<pad>", template=template, adds_bos=not bos_by_template)
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(
            **_text_config(tokenizer), rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        vision_feature_layer=feature_layer,
        vision_feature_select_strategy=strategy,
    )
    model = _random_model(transformers.LlavaForConditionalGeneration, config, tokenizer, seed)
    has_class_row = strategy == "default"
    processor_config = {
        "processor_class": "LlavaProcessor",
        "patch_size": vision.patch_size,
        "vision_feature_select_strategy": strategy,
        "image_token": "<image>",
        "num_additional_image_tokens": 1 if has_class_row else 0,
    }
    return _save(folder, model, tokenizer, processor, processor_config)


def _text_config(tokenizer: Any) -> dict[str, Any]:
    """Returns fields that Llama's and Qwen2's text configurations share: 4 query heads on 2 key heads."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _tokenizer(
    special: list[str], *, bos: str | None, eos: str, pad: str, template: str, adds_bos: bool = False
) -> Any:
    """Trains a byte-level BPE tokenizer on synthetic sentences, special tokens first."""
    tokenizer = tokenizers.Tokenizer.from_str(_trained(tuple(special)))
    if adds_bos and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    named = {"eos_token": eos, "pad_token": pad} | ({"bos_token": bos} if bos else {})
    others = [token for token in special if token not in named.values()]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        extra_special_tokens=others,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **named,
    )


@functools.cache
def _trained(special: tuple[str, ...]) -> str:
    """A trained tokenizer as JSON. Training takes longer than all else that building a folder does."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    trained: str = tokenizer.to_str()
    return trained


@functools.cache
def _corpus() -> tuple[str, ...]:
    """Returns 4000 sentences over 600 synthetic words and the words of the templates."""
    draw = random.Random(20240807)
    syllables = [first + second for first in "bdfgklmnprstvz" for second in ("a", "e", "i", "o", "u", "an", "er", "is")]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(600)]
    words += ["USER", "ASSISTANT", "SYSTEM", "what", "is", "in", "the", "picture", "which", "colour", "has", "it"]
    return tuple(" ".join(draw.choices(words, k=12)) + "." for _ in range(4000))


def _random_model(model_class: Any, config: Any, tokenizer: Any, seed: int) -> Any:
    """Returns a model with std ≈ 1/√fan_in weights, sharper attention, and special tokens that are never the argmax."""
    config.dtype = torch.float32
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter, generator)
        # A trained model answers with no placeholders; of the special tokens only EOS may come.
        quiet = [index for index in tokenizer.all_special_ids if index != tokenizer.eos_token_id]
        # A model around a causal one does not always name the head of that as its own.
        head = model.get_output_embeddings() or model.language_model.get_output_embeddings()
        head.weight[quiet] = 0.0
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    return model


def _draw(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    if parameter.ndim == 1:
        # "ln_q" is the norm in front of Qwen2-VL's projector.
        base = 1.0 if ("norm" in name or "ln_q" in name) and name.endswith("weight") else 0.0
        parameter.copy_(base + 0.1 * torch.randn(parameter.shape, generator=generator))
        return
    is_table = "embed_tokens" in name or "position_embedding" in name
    std = 1.0 if is_table else 1.0 / math.sqrt(parameter[0].numel())
    if any(part in name for part in ("q_proj", "k_proj", "qkv")):
        std *= 1.7
    parameter.copy_(std * torch.randn(parameter.shape, generator=generator))


def _save(
    folder: pathlib.Path, model: Any, tokenizer: Any, processor: Any, processor_config: dict[str, Any]
) -> pathlib.Path:
    """Writes all files; a failure leaves no half-written folder."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        processor.save_pretrained(folder)
        (folder / "processor_config.json").write_text(json.dumps(processor_config, indent=2))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder
