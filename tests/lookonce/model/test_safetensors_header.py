"""Headers of weight files, complete and broken."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from safetensors.torch import save_file

from lookonce.errors import ModelFolderError
from lookonce.model.safetensors_header import StoredTensor, read_header


def written(path: pathlib.Path, header: object, payload: bytes = b"") -> pathlib.Path:
    content = json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + payload)
    return path


def test_types_and_shapes_are_those_that_were_saved(tmp_path: pathlib.Path) -> None:
    tensors = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros((), dtype=torch.int32)}
    save_file(tensors, tmp_path / "file", metadata={"format": "pt"})
    header_bytes = 8 + int.from_bytes((tmp_path / "file").read_bytes()[:8], "little")
    assert read_header(tmp_path / "file") == {
        "a": StoredTensor("BF16", (2, 3), 12, header_bytes + 4),
        "b": StoredTensor("I32", (), 4, header_bytes),
    }


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": 1},
        {"a": {"dtype": "F32", "data_offsets": [0, 4]}},
        {"a": {"shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}},
    ],
    ids=str,
)
def test_other_headers_are_no_complete_file(tmp_path: pathlib.Path, header: object) -> None:
    with pytest.raises(ModelFolderError, match="not a complete safetensors file; download it again"):
        read_header(written(tmp_path / "file", header, bytes(4)))


def test_a_file_that_cannot_be_read_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelFolderError, match=r"file cannot be read: No such file or directory; download it again"):
        read_header(tmp_path / "file")
