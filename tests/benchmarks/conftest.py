"""Stacks of benchmarks are started quickly, and a stand-in takes the place of vLLM."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import pytest

from benchmarks.peer import PeerInstall
from tests.warm_processes import WarmProcesses

_STAND_IN = """
import os, sys
from types import SimpleNamespace

__version__ = "0.0"


class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert temperature == 0.0 and ignore_eos
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, model, **options):
        if options["dtype"] == "wrong":
            raise ValueError("no such dtype")
        print("noise on standard output")
        os.write(1, b"noise below Python\\n")
        self.num_resets = 0
        self.llm_engine = SimpleNamespace(reset_encoder_cache=self.reset)

    def reset(self):
        self.num_resets += 1

    reset_prefix_cache = reset_mm_cache = reset

    def generate(self, prompts, params, use_tqdm):
        if prompts[0]["prompt_token_ids"] == [666]:
            sys.exit("the engine died")
        return [self.answer(prompt, one) for prompt, one in zip(prompts, params)]

    def answer(self, prompt, params):
        # The sizes of its pictures and how often it was reset, so that the test sees what came in.
        images = prompt.get("multi_modal_data", {"image": []})["image"]
        said = [self.num_resets, *(image.width for image in images), *[7] * params.max_tokens]
        return SimpleNamespace(
            prompt_token_ids=prompt["prompt_token_ids"],
            num_cached_tokens=None,
            outputs=[SimpleNamespace(token_ids=said[: params.max_tokens])],
            metrics=SimpleNamespace(first_token_latency=0.5, first_token_ts=10.0, last_token_ts=12.0),
        )
"""


@pytest.fixture(scope="module", autouse=True)
def _warm_stacks(warm_processes: WarmProcesses) -> Iterator[None]:
    with warm_processes.for_stacks():
        yield


@pytest.fixture
def install(tmp_path: pathlib.Path) -> PeerInstall:
    """Returns an installation whose package `vllm` is the stand-in."""
    (tmp_path / "vllm.py").write_text(_STAND_IN)
    # Only the peer's interpreter finds it: services of the same test have their own environment.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return PeerInstall(python)
