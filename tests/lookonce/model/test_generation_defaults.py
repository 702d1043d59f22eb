"""Sampling defaults of model folders."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from transformers import GenerationConfig

from lookonce.errors import ModelFolderError
from lookonce.model.generation_defaults import GenerationDefaults, load_defaults


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


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"do_sample": true, "temperature": -1}', r"temperature must be in \[0, 100\], got -1;"),
        ('{"do_sample": true, "temperature": 1e400}', r"temperature must be in \[0, 100\], got inf;"),
        ('{"do_sample": true, "temperature": NaN}', r"temperature must be in \[0, 100\], got nan;"),
        ('{"repetition_penalty": 0}', r"repetition_penalty must be in \(0, 10\], got 0;"),
        ('{"top_p": 2}', r"top_p must be in \(0, 1\], got 2;"),
        ('{"top_p": 0}', r"top_p must be in \(0, 1\], got 0;"),
        ('{"min_p": 1.5}', r"min_p must be in \[0, 1\], got 1.5;"),
        ('{"top_k": -4}', r"top_k must be in \[0, 4294967295\], got -4;"),
        ('{"top_k": 1e400}', r"top_k must be in \[0, 4294967295\], got inf;"),
        ('{"min_new_tokens": -1}', r"min_new_tokens must be in \[0, 4294967295\], got -1;"),
        ('{"top_k": 1.5}', r"top_k must be a whole number, got 1.5;"),
        ('{"top_p": "0.5"}', r"top_p must be a number, got '0.5';"),
        ('{"top_k": true}', r"top_k must be a whole number, got True;"),
        ('{"eos_token_id": 1e400}', r"eos_token_id"),
        ('{"suppress_tokens": [1e400]}', r"suppress_tokens"),
    ],
)
def test_a_default_that_no_request_could_have_is_refused_by_name(
    tmp_path: pathlib.Path, content: str, reason: str
) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelFolderError, match=rf"generation_config\.json.*{reason}"):
        load_defaults(tmp_path, None)


def test_a_temperature_that_is_not_used_is_not_checked(tmp_path: pathlib.Path) -> None:
    assert defaults(tmp_path, {"do_sample": False, "temperature": -1}).temperature == 0.0


def test_whole_numbers_may_be_written_as_fractions(tmp_path: pathlib.Path) -> None:
    assert defaults(tmp_path, {"top_k": 5.0, "min_new_tokens": 2.0}) == GenerationDefaults(
        top_k=5, min_tokens=2, eos_token_ids=frozenset({9})
    )
