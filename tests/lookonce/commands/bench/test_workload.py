"""The requests of a run show as many pictures again as was asked for, and arrive as often."""

from __future__ import annotations

import itertools
import pathlib
import random

import pytest

from lookonce.commands.bench.drawing import Drawing
from lookonce.commands.bench.workload import Question, WorkloadOptions, arrival_times, questions


def made(reuse: float, num_pictures: int = 1, num_files: int = 0, num_requests: int = 200) -> list[Question]:
    files = [pathlib.Path(f"{number}.png") for number in range(num_files)]
    return questions(WorkloadOptions(num_requests, num_pictures, reuse, 8), files, random.Random(7))


@pytest.mark.parametrize(("reuse", "low", "high"), [(0.0, 200, 200), (0.5, 70, 130), (1.0, 1, 1)])
def test_the_share_of_pictures_seen_before_is_that_of_the_user(reuse: float, low: int, high: int) -> None:
    asked = made(reuse)
    num_new = sum(question.is_new for question in asked)
    assert low <= num_new <= high
    seen: set[object] = set()
    for question in asked:
        assert question.is_new is bool(set(question.pictures) - seen)
        seen.update(question.pictures)
    assert len(seen) == num_new
    assert made(reuse) == asked, "the seed decides"


def test_pictures_are_drawn_only_when_they_are_needed() -> None:
    first, second = (question.pictures[0] for question in made(0.0, num_requests=2))
    assert isinstance(first, Drawing)
    assert isinstance(second, Drawing)
    assert first.png() == first.png() != second.png()


def test_a_request_may_show_several_pictures_or_none() -> None:
    assert {len(question.pictures) for question in made(0.5, num_pictures=3)} == {3}
    assert made(0.5, num_pictures=0)[0] == Question((), False)


def test_files_are_each_shown_before_any_is_taken_again_for_lack_of_new_ones() -> None:
    asked = made(0.0, num_files=5, num_requests=12)
    assert [question.is_new for question in asked] == [True] * 5 + [False] * 7
    assert len({question.pictures for question in asked[:5]}) == 5
    assert {question.pictures for question in asked[5:]} <= {question.pictures for question in asked[:5]}


def test_arrivals_have_the_rate_and_random_gaps() -> None:
    times = arrival_times(2000, 50.0, random.Random(3))
    assert times[0] == 0.0
    assert times == sorted(times)
    assert 35 < times[-1] < 45
    gaps = {round(after - before, 9) for before, after in itertools.pairwise(times)}
    assert len(gaps) > 1900
