"""Tiny models for the tests of `lookonce doctor`."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lookonce.local import half_check
from lookonce.model.half_model import Half
from lookonce.model.model_folder import ModelFolder
from tests import tiny_families, tiny_models

BUILDERS: dict[str, Callable[[pathlib.Path], pathlib.Path]] = {
    **{name: module.build for name, module in tiny_families.FAMILIES.items()},
    **tiny_models.BUILDERS,
}


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """Returns the folder of a tiny model by its family's name; builds it once."""
    root = tmp_path_factory.mktemp("models")

    def build(name: str) -> pathlib.Path:
        return root / name if (root / name).exists() else BUILDERS[name](root / name)

    return build


@pytest.fixture
def copied(built: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    """Copies a tiny folder and changes fields of its configuration or of the text model's."""

    def copy(name: str, fields: Mapping[str, Any] | None = None, text: Mapping[str, Any] | None = None) -> pathlib.Path:
        path = tmp_path / name
        shutil.copytree(built(name), path)
        config = json.loads((path / "config.json").read_text())
        config |= fields or {}
        config["text_config"] |= text or {}
        (path / "config.json").write_text(json.dumps(config))
        return path

    return copy


@pytest.fixture
def only_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if a half is loaded: the installed transformers has the functions that need only headers."""

    def never(folder: ModelFolder, half: Half) -> None:
        raise AssertionError(f"the {half.value} half of {folder.path} was loaded")

    monkeypatch.setattr(half_check, "_loaded", never)
