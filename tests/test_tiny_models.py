"""The tiny models are worth testing with: their answers depend on the picture and on the text."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from tests import tiny_models
from tests.tiny_families import FAMILIES

NUM_IMAGES = 6


def answer(processor: Any, model: Any, image: Any, question: str) -> tuple[int, ...]:
    """Greedy tokens for one picture and one question."""
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    has_template = processor.chat_template is not None
    text = processor.apply_chat_template(messages, add_generation_prompt=True) if has_template else f"<image>{question}"
    inputs = processor(text=text, images=[[image]], return_tensors="pt").to(torch.float32)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return tuple(output[0, inputs["input_ids"].shape[1] :].tolist())


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_answers_depend_on_the_picture_and_on_the_text(name: str, tmp_path: pathlib.Path) -> None:
    folder = FAMILIES[name].build(tmp_path / name)
    processor, model = FAMILIES[name].load_processor(folder), tiny_models.load_model(folder)
    images = [tiny_models.random_image(seed) for seed in range(NUM_IMAGES)]
    answers = {answer(processor, model, image, "what is it?") for image in images}
    assert len(answers) == NUM_IMAGES
    assert answer(processor, model, images[0], "which colour?") not in answers
    special = set(processor.tokenizer.all_special_ids) - {processor.tokenizer.eos_token_id}
    assert not special & {token for tokens in answers for token in tokens}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_seed_gives_the_same_weights_again_and_another_one_others(name: str, tmp_path: pathlib.Path) -> None:
    files = [FAMILIES[name].build(tmp_path / str(index), seed=seed) for index, seed in enumerate((3, 3, 4))]
    first, second, other = ((folder / "model.safetensors").read_bytes() for folder in files)
    assert first == second != other
