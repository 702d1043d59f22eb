"""The refusal of folders without a usable tokenizer; what usable ones do is tested with the decoder's tokenizer."""

from __future__ import annotations

import json
import pathlib

import pytest
import transformers
from tokenizers import Tokenizer, models

from lookonce.errors import ModelFolderError
from lookonce.model.pretrained_tokenizer import load_pretrained
from tests import tiny_models


@pytest.mark.parametrize("content", [None, "", "{}", '{"model": 1}'])
def test_a_folder_without_a_usable_tokenizer_is_refused_in_one_line(
    content: str | None, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json") as caught:
        load_pretrained(tmp_path)
    assert "\n" not in caught.value.message


def test_a_configuration_that_contradicts_itself_is_not_told_as_a_problem_of_the_tokenizer(
    tmp_path: pathlib.Path,
) -> None:
    """To find the tokenizer's class, transformers reads config.json."""
    config = transformers.Qwen3Config(num_hidden_layers=2).to_dict() | {"layer_types": ["full_attention"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFolderError, match=r"fields take part in it: .*num_hidden_layers = 2") as caught:
        load_pretrained(tmp_path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "llava", "text_config": 3}'])
def test_a_configuration_without_fields_is_told_as_well(content: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFolderError, match=r"refuses config\.json of .*; use the config\.json that belongs"):
        load_pretrained(tmp_path)


def test_a_template_that_is_no_text_is_not_told_as_a_problem_of_the_tokenizer(tmp_path: pathlib.Path) -> None:
    tiny_models.build_llava_clip(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ messages }} \xff")
    with pytest.raises(ModelFolderError, match=r"jinja of .* cannot be read: it is not UTF-8 text; download it again"):
        load_pretrained(tmp_path)


def test_a_tokenizer_without_a_token_for_some_characters_is_accepted(tmp_path: pathlib.Path) -> None:
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.Unigram([("x", -1.0)], None, False))
    ).save_pretrained(tmp_path)
    pretrained = load_pretrained(tmp_path)
    assert pretrained.encode("xx") == [0, 0]
    with pytest.raises(Exception, match="unk_id"):
        pretrained.encode("What")


@pytest.mark.parametrize(("token_id", "told"), [(1 << 30, "has the id 1073741824"), (7, "has one id, 7, for")])
def test_ids_that_no_vocabulary_has_are_told(token_id: int, told: str, tmp_path: pathlib.Path) -> None:
    """A table with a place for each id would take gigabytes."""
    folder = tiny_models.build_llava_clip(tmp_path / "llava")
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary[[*vocabulary][-1]] = token_id
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelFolderError, match=told):
        load_pretrained(folder)
