"""Tests that Kustomize refuses components that exclude each other, with a message that names them."""

from __future__ import annotations

import pathlib

import pytest

from tests.k8s.variants import BASE, PROD, Variant, run_tool, skip_without_tool, write_overlay

_PAIRS = (
    ("mtls", "affinity"),
    ("mtls", "decoder-affinity"),
    ("mtls", "grpc-route"),
    ("hpa", "keda"),
    ("model-image-volume", "model-init-container"),
)


@pytest.mark.parametrize("pair", [*_PAIRS, *(pair[::-1] for pair in _PAIRS)], ids="+".join)
@pytest.mark.parametrize("start", [BASE.start, PROD.start])
def test_both_together_are_refused_by_name(pair: tuple[str, str], start: str, tmp_path: pathlib.Path) -> None:
    skip_without_tool()
    write_overlay(tmp_path, Variant(start, pair), nameSuffix="-b")
    finished = run_tool(tmp_path)
    assert finished.returncode != 0
    assert any(f"use-only-one-of-{one}-and-{other}" in finished.stderr for one, other in (pair, pair[::-1]))
