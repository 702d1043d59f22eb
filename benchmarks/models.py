"""Models for benchmarks: real shapes, random weights, built from configurations on first use. Nothing is downloaded.

Run time does not depend on the values of weights, so random ones serve, unless one token always wins.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
import random
import re
import shutil
from collections.abc import Callable
from typing import Any

import safetensors.torch
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

# Increased whenever the built models change, so that folders of an older version are not reused.
_FOLDER = pathlib.Path(__file__).parents[1] / "build/benchmark-models/2"
_SEED = 20261121
_TOKENIZER_SIZE = 1024
_LANGUAGE_LAYER = re.compile(r"language_model.*\.layers\..*_proj\.weight$")

_LLAVA_SPECIAL = ("<pad>", "<s>", "</s>", "<image>")
_LLAVA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ ' ' }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
QWEN_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
_QWEN_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
)


def small_llava(dtype: torch.dtype = torch.bfloat16) -> pathlib.Path:
    """The model for speed: SigLIP-base tower (12 layers of 768, 384 px: 576 rows) and a Llama of 135M parameters.

    The Llama has 30 layers of 576, 9 heads on 3 and a vocabulary of 49152. As in LLaVA-1.5, rows are those
    before the tower's last layer; keys of the weights are as published models have them, so that other engines read
    the folder, too.
    """
    name = str(dtype).removeprefix("torch.")
    return _built(f"small-llava-{name}", functools.partial(_build_small_llava, dtype))


def stored_as(folder: pathlib.Path, form: str) -> pathlib.Path:
    """Returns a copy of a model whose language model is stored in one of `PUBLISHED_FORMS`, without the head."""
    return _built(f"{folder.name}-{form}", functools.partial(_store_as, folder, form))


def large_image_qwen2_vl(max_rows: int = 8687) -> pathlib.Path:
    """Builds a Qwen2-VL for images of up to `max_rows` rows of 2 KiB, with two narrow layers for speed."""
    return _built(f"large-image-qwen2-vl-{max_rows}", functools.partial(_build_large_image_qwen2_vl, max_rows))


def demo_model() -> pathlib.Path:
    """Returns the demo model of the repository, for runs that only show that a script works."""
    return pathlib.Path(__file__).parents[1] / "models/demo"


def kv_token_bytes(folder: pathlib.Path) -> int:
    """Bytes of one token's keys and values in all layers of a folder's language model, as its checkpoint says."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(text.num_hidden_layers * 2 * text.num_key_value_heads * head_dim * config.dtype.itemsize)


def _store_as(source: pathlib.Path, form: str, folder: pathlib.Path) -> None:
    from tests.quantized_folders import PUBLISHED_FORMS

    shutil.copytree(source, folder, dirs_exist_ok=True)
    (file,) = folder.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    for name in [name for name in tensors if _LANGUAGE_LAYER.search(name)]:
        parts, _ = PUBLISHED_FORMS[form].store(tensors.pop(name).float(), 0)
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in parts.items()}
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(PUBLISHED_FORMS[form].entry)
    (folder / "config.json").write_text(json.dumps(config))


def _built(name: str, build: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Returns the model's folder and builds it on first use. An interrupted build leaves no folder."""
    folder = _FOLDER / name
    if not folder.exists():
        unfinished = folder.with_name(f"{name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        build(unfinished)
        unfinished.rename(folder)
    return folder


def _build_small_llava(dtype: torch.dtype, folder: pathlib.Path) -> None:
    tokenizer = _tokenizer(_LLAVA_SPECIAL, _LLAVA_TEMPLATE, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    config = transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=384,
            patch_size=16, vision_use_head=False,
        ),
        text_config=transformers.LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, rms_norm_eps=1e-5,
            tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
            **token_ids(tokenizer),
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"), image_seq_length=576,
        vision_feature_layer=-2, vision_feature_select_strategy="full", tie_word_embeddings=True,
    )  # fmt: skip
    model = _random_model(transformers.LlavaForConditionalGeneration, config, tokenizer)
    processor = SiglipImageProcessorPil(size={"height": 384, "width": 384})
    settings = {
        "processor_class": "LlavaProcessor", "patch_size": 16, "vision_feature_select_strategy": "full",
        "image_token": "<image>", "num_additional_image_tokens": 0,
    }  # fmt: skip
    _save(folder, model.to(dtype), tokenizer, processor, settings)
    _use_published_keys(folder / "model.safetensors")


def _build_large_image_qwen2_vl(max_rows: int, folder: pathlib.Path) -> None:
    tokenizer = qwen_tokenizer()
    text_config = {
        "model_type": "qwen2_vl_text", "vocab_size": len(tokenizer), "hidden_size": 512, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        **token_ids(tokenizer),
    }  # fmt: skip
    vision_config = {
        "depth": 1, "embed_dim": 64, "hidden_size": 512, "mlp_ratio": 2, "num_heads": 2, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in QWEN_SPECIAL}
    config = transformers.Qwen2VLConfig(
        text_config=text_config, vision_config=vision_config, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    model = _random_model(transformers.Qwen2VLForConditionalGeneration, config, tokenizer)
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 4 * 28 * 28, "longest_edge": max_rows * 28 * 28})
    _save(folder, model, tokenizer, processor, {"processor_class": "Qwen2VLProcessor"})


def qwen_tokenizer() -> Any:
    """Returns a small tokenizer with the special tokens and the chat template of Qwen."""
    return _tokenizer(QWEN_SPECIAL, _QWEN_TEMPLATE, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def token_ids(tokenizer: Any) -> dict[str, Any]:
    """Returns the special ids that configurations name."""
    return {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _tokenizer(special: tuple[str, ...], template: str, **named: str) -> Any:
    """A byte-level BPE tokenizer trained on made-up words."""
    draw = random.Random(_SEED)
    syllables = [first + second for first in "bdfgklmnprstvz" for second in ("a", "e", "i", "o", "u", "en", "or")]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(500)]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_TOKENIZER_SIZE, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((" ".join(draw.choices(words, k=12)) for _ in range(3000)), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        extra_special_tokens=[token for token in special if token not in named.values()],
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **named,
    )


def _random_model(model_class: Any, config: Any, tokenizer: Any) -> Any:
    """Returns a model whose weights keep activations in scale and which never picks ids without a token."""
    config.dtype = torch.float32
    torch.manual_seed(_SEED)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if ("norm" in name or "ln_q" in name) and name.endswith("weight") else 0.0)
            else:
                fan_in = parameter.shape[1] if "embed" in name else parameter[0].numel()
                parameter.normal_(0.0, _gain(name) / math.sqrt(fan_in))
        head = model.get_output_embeddings().weight
        head[len(tokenizer) :] = 0.0
        head[tokenizer.all_special_ids] = 0.0
    for name, value in token_ids(tokenizer).items():
        setattr(model.generation_config, name, value)
    return model


def _gain(name: str) -> float:
    """Scales attention so that it is selective; otherwise 30 layers make all tokens equal."""
    if "q_proj" in name or "k_proj" in name:
        return 1.6
    return 0.5 if "o_proj" in name else 1.0


def _save(folder: pathlib.Path, model: Any, tokenizer: Any, processor: Any, settings: dict[str, Any]) -> None:
    model.save_pretrained(folder)
    save_processor(folder, tokenizer, processor, settings)


def save_processor(folder: pathlib.Path, tokenizer: Any, processor: Any, settings: dict[str, Any]) -> None:
    """Writes everything of a model's folder but its weights and configuration."""
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(settings, indent=2))


def _use_published_keys(file: pathlib.Path) -> None:
    """transformers reads both, but since 5.0 leaves out the tower's `vision_model`, and vLLM 0.32 insists on it."""
    prefix = "vision_tower."
    weights = safetensors.torch.load_file(file)
    published = {
        f"{prefix}vision_model.{key.removeprefix(prefix)}" if key.startswith(prefix) else key: weight
        for key, weight in weights.items()
    }
    safetensors.torch.save_file(published, file, metadata={"format": "pt"})
