"""Our Triton kernels in Triton's interpreter, which runs them on the CPU, one program after the other."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from importlib.util import find_spec
from typing import Any

import pytest

# The folder into which `make venv` installs Triton, apart from the packages that services import.
TRITON_FOLDER = pathlib.Path(sys.prefix) / "triton"

if sys.platform != "linux":
    pytest.skip("there is no Triton for this system", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU, so kernels are compiled for it: `make bench-gpu` tests them", allow_module_level=True)
if find_spec("triton") is None:
    # A missing package fails: a skipped test would go unnoticed.
    assert TRITON_FOLDER.is_dir(), f"Triton is not in {TRITON_FOLDER}; `make venv` installs it"
    sys.path.append(str(TRITON_FOLDER))

from triton.runtime import interpreter  # noqa: E402

# Triton must be found first.
from decoder_svc.runner.cuda import fused_stack, triton_attention, triton_layers, triton_splits  # noqa: E402
from decoder_svc.runner.cuda.triton_attention import TritonBackend, tile_sizes  # noqa: E402

# Numbers of multiprocessors: so few that keys are not divided, so many that they are, and those of an H100.
FEW, SOME, MANY = 1, 24, 132


def _patch_once_per_launch() -> None:
    """Makes the interpreter prepare Triton's language once for each launch and module, which gives the same results.

    By itself it does so for every call of one kernel function by another one, which takes a third of its time.
    """
    prepared: set[int] = set()
    launch = interpreter.GridExecutor.__call__

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> None:
        prepared.clear()
        launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = self.fn.__globals__
        if id(names) not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(id(names))
        return self.rewrite()(*args, **kwargs)

    interpreter.GridExecutor.__call__ = launch_afresh
    interpreter.InterpretedFunction.__call__ = call


def _drop_overflow_checks() -> None:
    """Leaves out the interpreter's check of each sum of integers, which takes half of its time.

    Indexes of the tests are a thousand times too small to overflow, so the check cannot fail.
    """
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


_patch_once_per_launch()
_drop_overflow_checks()


def interpreted(num_processors: int = FEW) -> TritonBackend:
    """Returns a backend whose pools are on the CPU."""
    return TritonBackend(num_processors)


__all__ = [
    "FEW",
    "MANY",
    "SOME",
    "TRITON_FOLDER",
    "TritonBackend",
    "fused_stack",
    "interpreted",
    "tile_sizes",
    "triton_attention",
    "triton_layers",
    "triton_splits",
]
