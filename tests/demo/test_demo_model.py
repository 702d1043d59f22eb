"""The committed demo model loads offline with plain transformers, and its answers depend on the pictures."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

from demo.chats import Chat, Turn
from demo.evaluate import DemoModel, Outcome, answer_demo_question, ask_all, fresh_chats, summarise
from demo.questions import ask, demo_session
from demo.scenes import NUM_TRAINING_SEEDS, random_scene, render
from demo.wordings import QuestionKind, Split

MODEL_DIR = Path(__file__).parents[2] / "models" / "demo"
MAX_WEIGHTS_BYTES = 8 * 2**20
SEED = 31_337

MIN_ACCURACY = 0.95
SWAPPED_KINDS = (QuestionKind.COUNT, QuestionKind.DESCRIBE, QuestionKind.POSITION, QuestionKind.COLOUR)


@pytest.fixture(scope="module")
def model() -> DemoModel:
    return DemoModel(MODEL_DIR)


@pytest.fixture(scope="module")
def outcomes(model: DemoModel) -> list[Outcome]:
    return ask_all(model, fresh_chats(400, SEED, Split.HELD_OUT))


def test_fresh_pictures_in_held_out_wordings_are_answered_exactly(outcomes: list[Outcome]) -> None:
    wrong = [outcome for outcome in outcomes if not outcome.is_exact]
    assert summarise(outcomes).accuracy >= MIN_ACCURACY, wrong


def test_questions_about_a_single_shape_are_answered_exactly(model: DemoModel) -> None:
    rng = random.Random(SEED)
    chats: list[Chat] = []
    while len(chats) < 100:
        scene = random_scene(NUM_TRAINING_SEEDS + rng.randrange(2**40), 1)
        question = ask(rng.choice(SWAPPED_KINDS), (scene,), 0, Split.HELD_OUT, rng)
        if question is not None:
            chats.append(Chat(None, (scene,), (Turn(1, True, question),)))
    assert summarise(ask_all(model, chats)).accuracy >= 0.95


def test_several_pictures_and_later_turns_are_answered_as_well(outcomes: list[Outcome]) -> None:
    several = [outcome for outcome in outcomes if outcome.num_pictures > 1]
    later = [outcome for outcome in outcomes if outcome.turn > 1]
    for group, minimum in ((several, 0.93), (later, 0.93)):
        assert len(group) >= 50
        assert summarise(group).accuracy >= minimum


def swapped_pairs(num_pairs: int) -> list[Chat]:
    """Returns pairs of chats with the same words about two pictures with different right answers."""
    rng = random.Random(SEED)
    chats: list[Chat] = []
    while len(chats) < 2 * num_pairs:
        kind = rng.choice(SWAPPED_KINDS)
        scenes = [random_scene(NUM_TRAINING_SEEDS + rng.randrange(2**40)) for _ in range(2)]
        wording_seed = rng.random()
        asked = [ask(kind, (scene,), 0, Split.HELD_OUT, random.Random(wording_seed)) for scene in scenes]
        one, other = asked
        if one is None or other is None or one.text != other.text or one.answer == other.answer:
            continue
        chats += [
            Chat(None, (scene,), (Turn(1, True, question),))
            for scene, question in zip(scenes, (one, other), strict=True)
        ]
    return chats


def test_the_same_words_about_another_picture_get_another_answer(model: DemoModel) -> None:
    outcomes = ask_all(model, swapped_pairs(50))
    changed = [one.answer != other.answer for one, other in zip(outcomes[::2], outcomes[1::2], strict=True)]
    assert sum(changed) / len(changed) >= 0.95


def test_demo_session_is_answered_without_a_mistake(model: DemoModel) -> None:
    for question in demo_session():
        assert answer_demo_question(model, question) == question.expected


def test_processor_makes_as_many_placeholders_as_the_model_makes_rows() -> None:
    processor: Any = AutoProcessor.from_pretrained(MODEL_DIR, local_files_only=True)
    network: Any = LlavaForConditionalGeneration.from_pretrained(MODEL_DIR, local_files_only=True)
    pictures = [render(random_scene(NUM_TRAINING_SEEDS, size_px=size)) for size in ((224, 224), (320, 240), (90, 200))]
    parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": "How many shapes?"}]
    prompt = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    assert prompt.count("<image>") == len(pictures)
    inputs = processor(text=prompt, images=pictures, return_tensors="pt")
    with torch.inference_mode():
        rows = network.get_image_features(inputs["pixel_values"]).pooler_output
    assert [each.shape for each in rows] == [(36, 128)] * len(pictures)
    assert int((inputs["input_ids"] == network.config.image_token_index).sum()) == sum(len(each) for each in rows)


def test_tokenizer_round_trips_any_text_and_drops_special_tokens() -> None:
    tokenizer = AutoProcessor.from_pretrained(MODEL_DIR, local_files_only=True).tokenizer
    for text in ("How many red circles are there?", "naïve Ünïcödé — 写真 🟣", "  spaces\n\ttabs  "):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    ids = tokenizer.encode("<bos><|user|>Hello<|assistant|>red<eos>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hellored"


def test_chat_template_keeps_the_order_of_the_parts() -> None:
    processor: Any = AutoProcessor.from_pretrained(MODEL_DIR, local_files_only=True)
    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Here:"}, {"type": "image"}]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "Why?"},
    ]
    assert processor.apply_chat_template(chat, add_generation_prompt=True) == (
        "<bos><|system|>Be short.<|user|>Here:<|picture|>1<image><|assistant|>red<eos><|user|>Why?<|assistant|>"
    )


def test_the_report_beside_the_weights_meets_the_targets() -> None:
    report = json.loads((MODEL_DIR / "REPORT.json").read_text())
    assert report["held_out_pictures_and_wordings"]["accuracy"] >= MIN_ACCURACY
    assert all(report["demo_session_right"])
    assert report["training_seconds"] <= 60 * 60
    assert report["num_parameters"] <= 2_000_000
    assert (MODEL_DIR / "model.safetensors").stat().st_size <= MAX_WEIGHTS_BYTES
