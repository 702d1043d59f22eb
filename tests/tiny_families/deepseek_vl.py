"""Builds a tiny DeepSeek-VL folder: SigLIP tower of 56 px squares, 16 rows per image, Llama text."""

from __future__ import annotations

import pathlib
from typing import Any

import transformers
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil

from tests import tiny_models
from tests.tiny_families import parts

NAME = "deepseek_vl"
SIDE, PATCH = 56, 14
ROWS_PER_IMAGE = (SIDE // PATCH) ** 2
BOS, EOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
PAD, IMAGE = "<\uff5c\u2581pad\u2581\uff5c>", "<image_placeholder>"


def template(user: str, assistant: str) -> str:
    """Returns a chat template in which a role is followed by a colon, and a user's turn by an empty line."""
    return (
        "{% for message in messages %}"
        f"{{% if message['role'] == 'user' %}}{{{{ '{user}: ' }}}}"
        f"{{% elif message['role'] == 'assistant' %}}{{{{ '{assistant}: ' }}}}{{% endif %}}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}"
        f"{{% if part['type'] == 'image' %}}{{{{ '{IMAGE}\n' }}}}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
        "{% endfor %}{% endif %}"
        f"{{{{ '{EOS}' if message['role'] == 'assistant' else '\n\n' }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{assistant}:' }}}}{{% endif %}}"
    )


def tokenizer() -> Any:
    """Returns the tokenizer of both DeepSeek-VLs, which adds BOS."""
    return parts.named_tokenizer(
        [BOS, EOS, PAD, IMAGE],
        {"image_token": IMAGE},
        bos=BOS,
        eos=EOS,
        pad=PAD,
        template=template("User", "Assistant"),
        adds_bos=True,
    )


def outer_config(of_tokenizer: Any) -> dict[str, Any]:
    """Returns fields that the configurations of DeepSeek-VL and Janus share."""
    return {
        "text_config": transformers.LlamaConfig(
            **tiny_models._text_config(of_tokenizer), rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}
        ),
        "image_token_id": of_tokenizer.convert_tokens_to_ids(IMAGE),
        "tie_word_embeddings": False,
    }


def build(folder: pathlib.Path, *, seed: int = 0) -> pathlib.Path:
    """Writes the model's folder and returns its path."""
    own = tokenizer()
    config = transformers.DeepseekVLConfig(**outer_config(own), vision_config=parts.siglip_config(SIDE, PATCH))
    model = parts.random_model(
        transformers.DeepseekVLForConditionalGeneration, config, own, seed, gains=parts.ATTENTIVE
    )
    images = DeepseekVLImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_convert_rgb=True)
    settings = {"processor_class": "DeepseekVLProcessor", "num_image_tokens": ROWS_PER_IMAGE}
    return tiny_models._save(folder, model, own, images, settings)


def load_processor(folder: pathlib.Path) -> Any:
    """Returns the whole processor on the PIL backend."""
    return parts.load(folder, transformers.DeepseekVLProcessor)
