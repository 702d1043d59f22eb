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
