"""Sampling defaults of model folders."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from decoder_svc.prompt.generation_defaults import GenerationDefaults, load_defaults
from lookonce.errors import ModelFolderError


def defaults(folder: pathlib.Path, generation: Any = None, config: Any = None, eos: int | None = 9) -> Any:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return load_defaults(folder, eos)


def test_a_folder_that_says_nothing_is_greedy(tmp_path: pathlib.Path) -> None:
    assert defaults(tmp_path) == GenerationDefaults(eos_token_ids=frozenset({9}))


def test_values_are_taken_over(tmp_path: pathlib.Path) -> None:
    stated = {"do_sample": True, "temperature": 0.1, "top_p": 0.001, "top_k": 1, "repetition_penalty": 1.05}
    found = defaults(tmp_path, {**stated, "min_p": None, "eos_token_id": [4, 5]})
    assert found == GenerationDefaults(
        temperature=0.1, top_p=0.001, top_k=1, repetition_penalty=1.05, eos_token_ids=frozenset({4, 5})
    )


@pytest.mark.parametrize(
    ("stated", "temperature"),
    [({"temperature": 0.7}, 0.0), ({"do_sample": False, "temperature": 0.7}, 0.0), ({"do_sample": True}, 1.0)],
)
def test_temperature_counts_only_where_sampling_is_on(
    tmp_path: pathlib.Path, stated: dict[str, object], temperature: float
) -> None:
    assert defaults(tmp_path, stated).temperature == temperature


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 4}, {"eos_token_id": 5}, {4}),
        ({"eos_token_id": 0}, {"eos_token_id": 5}, {0}),
        ({}, {"eos_token_id": [5, 6], "text_config": {"eos_token_id": 7}}, {5, 6}),
        ({}, {"text_config": {"eos_token_id": 7}}, {7}),
        ({}, {"text_config": None}, {9}),
    ],
)
def test_the_end_of_sequence_is_the_first_one_that_is_named(
    tmp_path: pathlib.Path, generation: Any, config: Any, expected: set[int]
) -> None:
    assert defaults(tmp_path, generation, config).eos_token_ids == expected


@pytest.mark.parametrize("content", ['{"top_p": "much"}', "[1]", "{", '{"eos_token_id": ["x"]}', '{"top_k": []}'])
def test_broken_files_are_model_folder_errors(tmp_path: pathlib.Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelFolderError, match=r"generation_config\.json"):
        load_defaults(tmp_path, None)
