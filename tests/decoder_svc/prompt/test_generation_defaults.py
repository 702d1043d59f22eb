"""Sampling defaults of model folders."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from transformers import GenerationConfig

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


@pytest.mark.parametrize(
    ("stated", "top_k"),
    [
        ({}, None),
        ({"do_sample": True}, 50),
        ({"do_sample": True, "top_k": None}, 50),
        ({"do_sample": True, "top_k": 0}, None),
    ],
)
def test_sampling_without_a_top_k_takes_that_of_transformers(
    tmp_path: pathlib.Path, stated: dict[str, object], top_k: int | None
) -> None:
    assert GenerationConfig._get_default_generation_params()["top_k"] == 50
    assert defaults(tmp_path, stated).top_k == top_k


def test_suppressed_tokens_and_the_least_length_are_taken_over(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = defaults(tmp_path, {"suppress_tokens": [7, 8], "min_new_tokens": 3})
    assert (found.suppressed_token_ids, found.min_tokens) == ({7, 8}, 3)
    assert not caplog.records


def test_one_warning_names_the_fields_that_are_ignored(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    defaults(tmp_path, {"no_repeat_ngram_size": 3, "bad_words_ids": [[5, 6]], "num_beams": 1, "top_p": 0.5})
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "generation_config.json: ignored, although they change answers in transformers: "
            "no_repeat_ngram_size=3, bad_words_ids=[[5, 6]]",
        )
    ]


@pytest.mark.parametrize(
    "content",
    [
        '{"top_p": "much"}',
        '{"suppress_tokens": ["x"]}',
        '{"suppress_tokens": 5}',
        '{"min_new_tokens": []}',
        "[1]",
        "{",
        '{"eos_token_id": ["x"]}',
        '{"top_k": []}',
    ],
)
def test_broken_files_are_model_folder_errors(tmp_path: pathlib.Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelFolderError, match=r"generation_config\.json"):
        load_defaults(tmp_path, None)
