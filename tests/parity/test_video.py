"""Videos give the tokens of `generate`, with any caching, chunking and preemption."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
import torch

from decoder_svc.scheduling.prompt import Prompt
from tests.parity import frame_videos, offline, videos
from tests.parity.pair_videos import PairModel
from tests.parity.videos import Part, Video, VideoModel, frames
from tests.tiny_families import FAMILIES

WITH_AXES = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "cosmos3_omni", "cohere_compass",
)  # fmt: skip
NAMES = (
    *WITH_AXES,
    "qwen2_5_omni_thinker",
    "exaone4_5",
    "lfm3_vl",
    "glm4v",
    "glm46v",
    "glmga",
    "glm4v_moe",
    *frame_videos.MODELS,
)
SMALL_STEP = 11


class Asked:
    """A model with its questions and the reference's prompt ids."""

    def __init__(self, model: VideoModel) -> None:
        self.model = model
        asked = [model.question(parts) for parts in videos.questions(model, random.Random(3))]
        questions = [question for question, _ in asked]
        self.reference_ids = [ids for _, ids in asked]
        self.prompts: list[Prompt] = [question.prompt for question in questions]
        self.expected = [question.expected for question in questions]
        self.offline = model.offline_model(questions)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Asked]:
    base = tmp_path_factory.mktemp("videos")
    return functools.cache(lambda name: Asked(frame_videos.MODELS.get(name, PairModel)(FAMILIES[name], base / name)))


@pytest.fixture(params=NAMES)
def asked(request: pytest.FixtureRequest, built: Callable[[str], Asked]) -> Asked:
    return built(request.param)


def test_prompts_are_those_of_the_models_authors(asked: Asked) -> None:
    assert [list(prompt.token_ids) for prompt in asked.prompts] == asked.reference_ids


def test_cold(asked: Asked) -> None:
    assert offline.Session(asked.offline).ask(asked.prompts).token_ids == asked.expected
    assert len({tuple(answer) for answer in asked.expected}) > len(asked.expected) * 2 // 3


def test_chunked(asked: Asked) -> None:
    # A frame whose rows see each other is not split.
    spans = [span.length for prompt in asked.prompts for span in prompt.mutual_spans]
    session = offline.Session(asked.offline, max_num_batched_tokens=max([SMALL_STEP, *spans]))
    assert session.ask(asked.prompts).token_ids == asked.expected
    starts = {chunk.start for step in session.steps for chunk in step.chunks if chunk.num_tokens > 1}
    assert len(starts) > len(asked.prompts), "prompts are cut"


def test_preempted(asked: Asked) -> None:
    sizes = [-(-len(prompt.token_ids) // videos.BLOCK_SIZE) for prompt in asked.prompts]
    session = offline.Session(asked.offline, num_blocks=max(max(sizes) + 1, sum(sizes) // 2))
    assert session.ask(asked.prompts).token_ids == asked.expected
    assert sum(len(step.admitted) for step in session.steps) > len(asked.prompts), "somebody came back"


def test_prefix_hits_at_each_block_of_a_video(asked: Asked) -> None:
    session = offline.Session(asked.offline, num_blocks=5000, cache_rows=4000)
    first = session.ask(asked.prompts)
    pool = session.scheduler.kv_cache.pool
    for request in first.requests:
        for item in request.prompt.images[-1:]:
            middle = (item.span.offset + item.span.stop) // 2
            named = [pool.find(name) for name in request.block_hashes[middle // videos.BLOCK_SIZE :]]
            pool.withdraw([block for block in named if block is not None])
    again = session.ask(asked.prompts)
    assert again.token_ids == asked.expected
    assert sum(request.usage.cached_prompt_tokens > 0 for request in again.requests) > len(asked.prompts) // 2


def test_entries_are_shared_between_videos_and_positions(asked: Asked) -> None:
    """The same two frames, first and last of two videos, are the same entries.

    In reverse order they are another entry if they are encoded as a pair.
    """
    one, other = ([item.key for item in asked.prompts[number].images] for number in (7, 8))
    half = len(one) // 2
    assert one == other[half:] + other[:half]
    (first, second) = frames(1, 2)
    turned = [item.key for item in asked.model.prompt([Video([second, first])]).images]
    if asked.model.text.family.frames_per_entry == 1:
        assert turned == one[:half][::-1]
    else:
        assert not set(turned) & set(one)


def test_blocks_are_not_shared_where_the_time_differs(asked: Asked) -> None:
    """The same frames at another speed: positions differ even where tokens and keys are equal."""
    shown = frames(9, 6)
    session = offline.Session(asked.offline, num_blocks=5000, cache_rows=4000)
    slow, fast = (asked.model.question([Video(shown, fps=fps), "what"])[0] for fps in (0.25, 1.0))
    session = offline.Session(asked.model.offline_model([slow, fast]), num_blocks=5000, cache_rows=4000)
    for question in (slow, fast, slow):
        assert session.ask([question.prompt]).token_ids == [question.expected]


@pytest.mark.parametrize("asked", ["llava_onevision"], indirect=True)
def test_images_beside_a_video_count_as_several(asked: Asked) -> None:
    """With two images, each is encoded without tiles, also if the prompt has a video."""
    model = asked.model
    pictures: list[Part] = [*frames(21, 1, 90, 60), *frames(22, 1, 60, 130)]
    shown: list[list[Part]] = [[*pictures[:number], Video(frames(23, 3)), "what"] for number in (1, 2)]
    questions = [model.question(parts)[0] for parts in shown]
    assert [one.prompt.images[0].options.beside_others for one in questions] == [False, True]
    session = offline.Session(model.offline_model(questions))
    assert session.ask([one.prompt for one in questions]).token_ids == [one.expected for one in questions]


@pytest.mark.parametrize("asked", WITH_AXES, indirect=True)
def test_positions_are_those_of_transformers_where_space_outlasts_time(asked: Asked) -> None:
    """The rule of transformers 5.23 starts the text after a video's height and width, regardless of its time."""
    model = asked.model
    parts: list[Part] = [Video(frames(1, 4, 140, 56), fps=4.0), "what", Video(frames(2, 2, 56, 140)), "is it"]
    prompt, inputs = model.prompt(parts), model.inputs(parts)
    theirs, delta = type(model.reference.model).get_rope_index(
        model.reference.model,
        **{name: inputs[name] for name in ("input_ids", "mm_token_type_ids", "video_grid_thw")},
        **({"second_per_grid_ts": torch.tensor([0.5, 1.0])} if model.name == "qwen2_5_vl" else {}),
    )
    assert prompt.positions is not None
    assert [list(axis) for axis in prompt.positions.axes] == theirs[:, 0].tolist()
    assert prompt.positions.delta == delta.item()
