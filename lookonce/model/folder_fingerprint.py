"""The fingerprint that an encoder has when it serves a model folder, without running that encoder.

`python -m lookonce.model.folder_fingerprint FOLDER DTYPE ROW_DTYPE` prints it: for a process that must not load weights
itself.
"""

from __future__ import annotations

import pathlib
import sys

import torch

from lookonce.content_key import EncoderFingerprint
from lookonce.embedding_meta import RowDtype
from lookonce.model.family_model import FamilyModel
from lookonce.model.half_model import load_vision_half
from lookonce.model.model_folder import ModelFolder
from lookonce.model.vision_fingerprint import dtype_name, vision_fingerprint

_TORCH_DTYPES = {
    RowDtype.FLOAT32: torch.float32,
    RowDtype.BFLOAT16: torch.bfloat16,
    RowDtype.FLOAT16: torch.float16,
}


def folder_fingerprint(
    folder: ModelFolder, model: FamilyModel, dtype: RowDtype | None = None, row_dtype: RowDtype | None = None
) -> tuple[EncoderFingerprint, RowDtype]:
    """Returns the fingerprint and the element type of the forward pass.

    `dtype` None means the checkpoint's, `row_dtype` None that of the forward pass. Reads every weight of the vision half
    once. Raises ModelFolderError if the folder lacks one.
    """
    half = load_vision_half(folder.path, None if dtype is None else _TORCH_DTYPES[dtype])
    return vision_fingerprint(folder, half, model, row_dtype), RowDtype(dtype_name(half))


def main(arguments: list[str]) -> None:
    """Prints the fingerprint of a folder for two names of element types."""
    path, dtype, row_dtype = arguments
    folder = ModelFolder.open(pathlib.Path(path))
    fingerprint, _ = folder_fingerprint(folder, FamilyModel.load(folder), RowDtype(dtype), RowDtype(row_dtype))
    print(fingerprint)


if __name__ == "__main__":
    main(sys.argv[1:])
