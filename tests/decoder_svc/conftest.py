"""Tiny model folders and the texts of their tokenizers, built once per test session."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from decoder_svc.service import LoadedText, load_text
from decoder_svc.settings import DecoderSettings
from tests import tiny_models


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """Returns the folder of one of `tiny_models.BUILDERS` by name."""
    built: dict[str, pathlib.Path] = {}

    def folder(name: str) -> pathlib.Path:
        if name not in built:
            built[name] = tiny_models.BUILDERS[name](tmp_path_factory.mktemp("tiny") / name)
        return built[name]

    return folder


@pytest.fixture(params=sorted(tiny_models.BUILDERS))
def any_folder(request: pytest.FixtureRequest, model_folder: Callable[[str], pathlib.Path]) -> pathlib.Path:
    """Each tiny model's folder in turn."""
    return model_folder(request.param)


@pytest.fixture
def any_text(any_folder: pathlib.Path) -> LoadedText:
    """Tokenizer, template and family of each tiny model in turn."""
    return loaded(any_folder)


@pytest.fixture
def llava_text(model_folder: Callable[[str], pathlib.Path]) -> LoadedText:
    """Tokenizer, template and family of the LLaVA whose tokenizer adds the beginning-of-sequence token."""
    return loaded(model_folder("llava_clip"))


@pytest.fixture
def any_processor(any_folder: pathlib.Path) -> Any:
    """The Hugging Face processor of the same folder as `any_text`."""
    return tiny_models.load_processor(any_folder)


def loaded(folder: pathlib.Path, **settings: Any) -> LoadedText:
    """Loads everything in a model folder except its weights."""
    return load_text(DecoderSettings(model=folder, **settings))
