"""The value of `--model`: folders, names on the hub, and the name under which a model is served."""

from __future__ import annotations

import pathlib

import pytest

from lookonce.errors import ModelFolderError
from lookonce.local.model_source import resolve_model, served_name, with_resolved_model


def test_a_folder_and_other_flags_stay_as_they_are(tmp_path: pathlib.Path) -> None:
    flags = ["--model", str(tmp_path), f"--model={tmp_path}", "--dtype", "auto", "--model"]
    assert with_resolved_model(flags) == flags


def test_a_model_from_the_hub_is_served_under_its_hub_name(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, folder = "Qwen/Qwen2-VL-2B-Instruct", str(tmp_path / "snapshots" / "0123abc")
    monkeypatch.setattr("lookonce.local.model_source._download", lambda _name: pathlib.Path(folder))
    named = ["--served-model-name", name]
    assert with_resolved_model(["--model", name]) == ["--model", folder, *named]
    assert with_resolved_model([f"--model={name}", "--dtype", "auto"]) == [
        f"--model={folder}",
        "--dtype",
        "auto",
        *named,
    ]
    for own in (["--served-model-name", "mine"], ["--served-model-name=mine"]):
        assert with_resolved_model(["--model", name, *own]) == ["--model", folder, *own]
    monkeypatch.setenv("LOOKONCE_SERVED_MODEL_NAME", "mine")
    assert with_resolved_model(["--model", name]) == ["--model", folder]


@pytest.mark.parametrize("name", ["", "no/such/folder", "../up", "a b/c", "/absolute"])
def test_a_name_that_is_neither_folder_nor_hub_name_is_refused(name: str) -> None:
    with pytest.raises(ModelFolderError, match="neither a folder nor a name"):
        resolve_model(name)


def test_an_existing_folder_is_used_without_asking_the_hub(tmp_path: pathlib.Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    assert served_name(str(tmp_path), tmp_path) == []
