"""The language model that llama.cpp gets is ours: names, numbers, and the order of rotated rows."""

from __future__ import annotations

import pathlib

import numpy as np
import safetensors.torch
import torch

from benchmarks import llama_cpp_worker as worker
from benchmarks.models import demo_model
from tests.tiny_models import build_llava_clip


def test_numbers_are_those_of_the_file(tmp_path: pathlib.Path) -> None:
    for folder in (demo_model(), build_llava_clip(tmp_path / "llava")):
        expected = safetensors.torch.load_file(folder / "model.safetensors")
        found = worker._weights(folder)
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            np.testing.assert_array_equal(found[name], weight.float().numpy())


def test_every_tensor_of_the_language_model_has_a_name_and_no_other_one() -> None:
    names = worker._weights(demo_model())
    given = {name: worker._gguf_name(name) for name in names}
    assert all((own is None) == ("language_model" not in name) for name, own in given.items())
    own_names = [own for own in given.values() if own is not None]
    assert len(set(own_names)) == len(own_names)
    assert {"token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight"} <= {*own_names}


def test_neighbouring_rows_are_those_that_a_rotation_pairs() -> None:
    """transformers rotates row r with row r + half of a head, llama.cpp row 2r with row 2r + 1."""
    num_heads, half = 3, 4
    rows = torch.arange(num_heads * 2 * half)[:, None].expand(-1, 5).numpy()
    found = worker._interleaved(rows, num_heads).reshape(num_heads, half, 2, 5)
    first, second = found[:, :, 0, 0], found[:, :, 1, 0]
    assert (second - first == half).all()
    assert (first[:, 0] == [0, 2 * half, 4 * half]).all()
