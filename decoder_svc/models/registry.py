"""Model type → family."""

from __future__ import annotations

from typing import Any, Protocol

from decoder_svc.models.base import FamilyAdapter
from decoder_svc.models.llava import LlavaFamily
from decoder_svc.models.qwen2_vl import Qwen2VLFamily
from lookonce.errors import ModelFolderError
from lookonce.model_folder import ModelFolder


class _FamilyClass(Protocol):
    def __call__(self, folder: ModelFolder, image_token: str, image_token_id: int) -> FamilyAdapter: ...


_FAMILIES: dict[str, _FamilyClass] = {"llava": LlavaFamily, "qwen2_vl": Qwen2VLFamily}


def load_family(folder: ModelFolder, tokenizer: Any) -> FamilyAdapter:
    """The adapter of a folder. Raises ModelFolderError when tokenizer and configuration do not name the placeholder."""
    config = folder.config
    token_id = config.get("image_token_index", config.get("image_token_id"))
    if token_id is None:
        raise ModelFolderError("config.json names no image token (image_token_index or image_token_id)")
    token = tokenizer.convert_ids_to_tokens(int(token_id))
    if token is None:
        raise ModelFolderError(f"the tokenizer has no token with the image token's id {token_id}")
    return _FAMILIES[folder.model_type](folder, str(token), int(token_id))
