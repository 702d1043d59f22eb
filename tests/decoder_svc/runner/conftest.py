"""The runner's tests compute with our products, also on machines where PyTorch's are faster.

A trial takes PyTorch's there (lookonce/model/kernels/kernel_trial.py), and what these tests are about would not run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lookonce.model.kernels import kernel_trial
from lookonce.model.kernels.kernel_choice import NATIVE, PYTORCH, KernelChoice


@pytest.fixture(scope="module", autouse=True)
def _native_products() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for dtype in ("float32", "bfloat16"):
            operation = f"linear layers {dtype}"
            choice = KernelChoice(operation, NATIVE, {NATIVE: 1.0, PYTORCH: 2.0})
            patch.setitem(kernel_trial._choices, operation, choice)
        yield
