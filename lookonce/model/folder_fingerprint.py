"""The fingerprint that an encoder has when it serves a model folder, without running that encoder.

`python -m lookonce.model.folder_fingerprint FOLDER ROW_DTYPE DTYPE…` prints one for each type of the forward pass. A
process that must not load weights itself starts it.
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

    `dtype` None means the checkpoint's, `row_dtype` None that of the forward pass. Reads the vision half's weights
    once. Raises ModelFolderError if the folder lacks one of them.
    """
    half = load_vision_half(folder.path, None if dtype is None else _TORCH_DTYPES[dtype])
    return vision_fingerprint(folder, half, model, row_dtype), RowDtype(dtype_name(half))


def main(arguments: list[str]) -> None:
    """Prints a folder's fingerprints, one in a line."""
    path, row_dtype, *dtypes = arguments
    folder = ModelFolder.open(pathlib.Path(path))
    model = FamilyModel.load(folder)
    for dtype in dtypes:
        print(folder_fingerprint(folder, model, RowDtype(dtype), RowDtype(row_dtype))[0])


if __name__ == "__main__":
    main(sys.argv[1:])
