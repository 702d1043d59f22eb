"""Independent questions in one row train the model as separate conversations would."""

from __future__ import annotations

import random

import pytest
import torch

from demo.chats import random_questions
from demo.model import NUM_ROWS, build_model
from demo.scenes import random_scene
from demo.token_batches import branch, pad, render_chats
from demo.tokenizer import IMAGE, train_tokenizer
from demo.train import answer_lengths, hidden_states
from demo.wordings import Split

NUM_QUESTIONS = 3


@pytest.mark.parametrize("num_pictures", [1, 2])
def test_a_branch_is_computed_as_if_it_stood_alone(num_pictures: int) -> None:
    tokenizer = train_tokenizer(seed=7, num_questions=500)
    model = build_model(tokenizer, seed=7).eval()
    scenes = [random_scene(seed, 2) for seed in range(num_pictures)]
    chats = random_questions(scenes, NUM_QUESTIONS, Split.TRAINING, random.Random(3))
    rendered = render_chats(chats, tokenizer)
    pixels = torch.rand(num_pictures, 3, 96, 96)
    row = branch(rendered, tokenizer.convert_tokens_to_ids(IMAGE))
    with torch.no_grad():
        image_rows = torch.stack(list(model.get_image_features(pixels).pooler_output))
        together = hidden_states(model, pad([row], tokenizer.pad_token_id, image_rows))[0]
    num_shared = row.branches.count(0)
    assert num_shared > num_pictures * NUM_ROWS
    start = num_shared
    for ids, flags in rendered:
        alone = model.model(input_ids=torch.tensor([ids]), pixel_values=pixels, use_cache=False).last_hidden_state[0]
        stop = start + len(ids) - num_shared
        assert torch.allclose(together[start:stop], alone[num_shared:], atol=1e-4)
        assert row.is_answer[start:stop] == flags[num_shared:]
        start = stop
    assert start == len(row.ids)


def test_conversations_that_begin_differently_are_not_joined() -> None:
    with pytest.raises(ValueError, match="differ"):
        branch([([1, 3, 5], [False] * 3), ([2, 3, 5], [False] * 3)], image_id=3)


def test_each_answer_token_knows_the_length_of_its_answer() -> None:
    is_answer = torch.tensor([[False, True, True, False, True], [True, False, True, True, True]])
    assert answer_lengths(is_answer).tolist() == [2, 2, 1, 1, 3, 3, 3]
