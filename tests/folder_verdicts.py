"""Says whether `lookonce doctor` and the start of the services take a model folder, and compares the two."""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

from decoder_svc import assembly
from decoder_svc.constraint.folder_vocabulary import folder_vocabulary
from decoder_svc.device_choice import choose_device
from decoder_svc.engine.heartbeat import Heartbeat
from decoder_svc.service import load_text
from decoder_svc.settings import DecoderSettings
from encoder_svc.settings import EncoderSettings
from encoder_svc.vision.vision_model import VisionModel
from lookonce.errors import LookonceError
from lookonce.local.doctor_model import examine_folder
from lookonce.model.model_folder import ModelFolder
from lookonce.server.settings_parser import parse_settings

# Values that no field has by chance.
DAMAGED: tuple[Any, ...] = (0, -1, 10**9, None, "a string")


def numeric_fields(path: pathlib.Path, file: str = "config.json") -> list[tuple[str, ...]]:
    """Returns the paths of all fields of a JSON file that hold a number, in the order of the file."""
    return list(_numeric(json.loads((path / file).read_text()), ()))


def _numeric(part: dict[str, Any], outer: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, value in part.items():
        if isinstance(value, dict):
            yield from _numeric(value, (*outer, name))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*outer, name)


def set_field(path: pathlib.Path, field: tuple[str, ...], value: Any, file: str = "config.json") -> None:
    """Writes a value into a field of a folder's JSON file."""
    settings = json.loads((path / file).read_text())
    part = settings
    for name in field[:-1]:
        part = part[name]
    part[field[-1]] = value
    (path / file).write_text(json.dumps(settings))


def doctor_refusal(path: pathlib.Path) -> str | None:
    """Returns why `lookonce doctor` refuses a folder, None if it takes it. Other exceptions are faults of doctor."""
    try:
        faults = [finding for finding in examine_folder(ModelFolder.open(path)) if not finding.is_fine]
    except LookonceError as error:
        return str(error)
    return "; ".join(f"{finding.subject}: {finding.detail}" for finding in faults) or None


def start_refusal(path: pathlib.Path) -> str | None:
    """Returns why an encoder or a decoder refuses to start with a folder, None if both do."""
    flags = ["--model", str(path), "--num-kv-blocks", "64", "--num-threads", "1", "--max-num-seqs", "4"]
    try:
        VisionModel.load_warm(parse_settings(EncoderSettings, flags[:2], "encoder_svc").vision)
        settings = parse_settings(DecoderSettings, flags, "decoder_svc")
        family = load_text(settings).family
        vocabulary = functools.partial(folder_vocabulary, path)
        assembly.load_core(settings, choose_device(settings), family, Heartbeat(math.inf), vocabulary)
    except LookonceError as error:
        return str(error)
    return None
