"""Reads the vocabulary of a model folder."""

from __future__ import annotations

import json
import pathlib

from decoder_svc.constraint.frames import Vocabulary
from lookonce.model.pretrained_tokenizer import load_pretrained


def folder_vocabulary(folder: pathlib.Path) -> Vocabulary:
    """Returns the tokenizer of a model folder. Takes up to some seconds."""
    pretrained = load_pretrained(folder)
    return tokenizer_vocabulary(pretrained.backend_tokenizer.to_str(), pretrained.eos_token_id)


def tokenizer_vocabulary(tokenizer_json: str, end_token_id: int | None) -> Vocabulary:
    """Returns the vocabulary of a tokenizer without cuts and padding."""
    state = json.loads(tokenizer_json)
    state["truncation"] = state["padding"] = None
    return Vocabulary(json.dumps(state), end_token_id)
