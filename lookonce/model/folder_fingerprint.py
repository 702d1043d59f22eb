"""The fingerprint that an encoder has when it serves a model folder, without running that encoder."""

from __future__ import annotations

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
