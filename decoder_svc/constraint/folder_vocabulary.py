"""Reads the vocabulary of a model folder."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from decoder_svc.constraint.frames import Vocabulary
from lookonce.model.pretrained_tokenizer import load_pretrained


def folder_vocabulary(folder: pathlib.Path) -> Vocabulary:
    """Returns the tokenizer of a model folder. Takes up to some seconds."""
    pretrained = load_pretrained(folder)
    return tokenizer_vocabulary(pretrained.backend_tokenizer.to_str(), pretrained.eos_token_id)


def tokenizer_vocabulary(tokenizer_json: str, end_token_id: int | None) -> Vocabulary:
    """Returns the vocabulary of a tokenizer without cuts and padding, in which no text is a control token.

    llguidance writes text as the tokenizer splits it. The text `<s>` would become the token that begins a sequence,
    which no mask allows; under another name, the token is no text, and `<s>` has the tokens of its characters.
    """
    state = json.loads(tokenizer_json)
    state["truncation"] = state["padding"] = state["post_processor"] = None
    names = {
        token["content"]: f"<\ue000 control token {token['id']}>" for token in state["added_tokens"] if is_masked(token)
    }
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = state["model"]
    model["vocab"] = _renamed(model["vocab"], names)
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return Vocabulary(json.dumps(state), end_token_id)


def is_masked(token: Mapping[str, Any]) -> bool:
    """Whether an added token is a control token for llguidance, so that no text has it."""
    return bool(token["special"]) or (token["content"].startswith("<") and token["content"].endswith(">"))


def _renamed(vocabulary: Any, names: dict[str, str]) -> Any:
    """Returns a vocabulary (ids by token, or a list of tokens with scores) with some of its tokens renamed."""
    if isinstance(vocabulary, dict):
        return {names.get(token, token): token_id for token, token_id in vocabulary.items()}
    return [[names.get(token, token), score] for token, score in vocabulary]
