"""`lookonce doctor` and the start of the services agree about folders whose config.json has a damaged number.

A fixed choice of the numbers in config.json of some tiny models is replaced, each by one of the values of `DAMAGED`.
"""

from __future__ import annotations

import pathlib
import random
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.folder_verdicts import DAMAGED, doctor_refusal, numeric_fields, set_field, start_refusal

_NUM_CASES = 25
# Text models of several kinds: with experts, with recurrent layers, with a window, and a plain one.
_NAMES = ("gemma3", "qwen3_5_moe", "mistral4", "llava_clip")
# Fields whose damage ended a start with a traceback, or was found by the start alone.
_KNOWN: tuple[tuple[str, str, Any], ...] = (
    ("gemma3", "text_config.rope_parameters.full_attention.rope_theta", 0),
    ("gemma3", "text_config.query_pre_attn_scalar", -1),
    ("gemma3", "vision_config.num_channels", 10**9),
    ("qwen3_5_moe", "text_config.num_experts_per_tok", -1),
    ("qwen3_5_moe", "text_config.num_experts_per_tok", 9),
    ("mistral4", "text_config.n_group", 0),
    ("mistral4", "text_config.n_group", 3),
)


def _verdicts(path: pathlib.Path) -> tuple[str | None, str | None]:
    return doctor_refusal(path), start_refusal(path)


@pytest.mark.parametrize("name", _NAMES)
def test_both_take_or_both_refuse_a_folder(
    name: str, family_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    cases = [(field, value) for field in numeric_fields(family_folder(name)) for value in DAMAGED]
    chosen = random.Random(name).sample(cases, _NUM_CASES)
    refusals = 0
    for number, (field, value) in enumerate(chosen):
        path = tmp_path / str(number)
        shutil.copytree(family_folder(name), path)
        set_field(path, field, value)
        of_doctor, of_start = _verdicts(path)
        assert (of_doctor is None) is (of_start is None), (field, value, of_doctor, of_start)
        assert "\n" not in f"{of_doctor}{of_start}", (field, value)
        refusals += of_doctor is not None
    assert 0 < refusals < len(chosen)


@pytest.mark.parametrize(("name", "field", "value"), _KNOWN)
def test_a_number_with_which_no_step_can_be_computed_is_refused_by_both(
    name: str, field: str, value: Any, family_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(family_folder(name), path)
    assert _verdicts(path) == (None, None)
    set_field(path, tuple(field.split(".")), value)
    of_doctor, of_start = _verdicts(path)
    assert of_doctor is not None
    assert of_start is not None
    assert "config.json" in of_doctor
    assert "config.json" in of_start
    assert "\n" not in of_doctor + of_start


# Damage that both name by its field, whichever library's exception it causes.
_NAMED: tuple[tuple[str, str, Any], ...] = (
    ("gemma3", "text_config.num_attention_heads", 5),
    ("gemma3", "text_config.num_key_value_heads", 4),
    ("gemma3", "text_config.intermediate_size", 129),
    ("gemma3", "text_config.num_hidden_layers", 7),
    ("gemma3", "vision_config.num_hidden_layers", 1),
    ("gemma3", "vision_config.num_attention_heads", 5),
    ("gemma3", "vision_config.num_channels", 0),
    ("mistral4", "text_config.n_group", 3),
    ("mistral4", "text_config.qk_nope_head_dim", 33),
    ("mistral4", "text_config.first_k_dense_replace", 2),
    ("mistral4", "text_config.rope_parameters.factor", "a string"),
    ("qwen3_5_moe", "text_config.rope_parameters.rope_theta", None),
)


@pytest.mark.parametrize(("name", "field", "value"), _NAMED)
def test_both_name_a_field_that_does_not_fit_others_or_the_weights(
    name: str, field: str, value: Any, family_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(family_folder(name), path)
    set_field(path, tuple(field.split(".")), value)
    part, _, rest = field.partition(".")
    for refusal in _verdicts(path):
        assert refusal is not None
        assert "config.json" in refusal
        assert part in refusal or "the language model" in refusal
        assert (rest or part) in refusal
        assert "null" in refusal if value is None else str(value) in refusal
        assert "\n" not in refusal


@pytest.mark.parametrize("name", ["glm4v_moe", "ernie4_5_vl_moe"])
@pytest.mark.parametrize("part", ["down_proj", "up_proj"])
def test_both_name_a_matrix_of_one_expert(
    name: str, part: str, family_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(family_folder(name), path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    matrix = next(key for key in tensors if key.endswith(f"experts.3.{part}.weight"))
    save_file({key: tensor for key, tensor in tensors.items() if key != matrix}, file, metadata={"format": "pt"})
    for refusal in _verdicts(path):
        assert f"{matrix} is missing; download the model again" in (refusal or "")
    save_file(tensors | {matrix: tensors[matrix][:-1].clone()}, file, metadata={"format": "pt"})
    for refusal in _verdicts(path):
        assert f"{matrix} is {list(tensors[matrix][:-1].shape)}, and those of other experts are" in (refusal or "")
