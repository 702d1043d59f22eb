"""MiniCPM-V 4.7: MiniCPM-V 4.6 with positions on a canvas, over which an image's slices and its whole view lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lookonce.families import minicpmv4_6
from lookonce.families.base import FamilySource, PositionAxes

# Fields of config.json with the ids of markers, and the names of the tokenizer's tokens.
_MARKERS = {
    "image_start_id": "image_start_token",
    "image_end_id": "image_end_token",
    "slice_start_id": "slice_start_token",
    "slice_end_id": "slice_end_token",
}


def _canvas_markers(source: FamilySource) -> Mapping[str, int]:
    ids = {source.tokens[name]: getattr(source.config, field) for field, name in _MARKERS.items()}
    return {**ids, "\n": source.config.newline_id}


def _refusal(source: FamilySource) -> str | None:
    missing = [field for field in (*_MARKERS, "newline_id") if not isinstance(getattr(source.config, field), int)]
    if missing:
        return f"its config.json lacks the ids of markers, without which positions are unknown: {', '.join(missing)}"
    return minicpmv4_6.FAMILY.refusal(source)


FAMILY = replace(
    minicpmv4_6.FAMILY,
    title="MiniCPM-V 4.7",
    model_type="minicpmv4_7",
    architecture="MiniCPMV4_7ForConditionalGeneration",
    axes=PositionAxes.CANVAS,
    canvas_markers=_canvas_markers,
    refusal=_refusal,
)
