"""The runner's tests compute with our kernels, also on machines and at levels where PyTorch's are faster.

A trial takes PyTorch's there (lookonce/model/kernels/kernel_trial.py), and what these tests are about would not run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lookonce.model.kernels import kernel_trial
from lookonce.model.kernels.kernel_choice import NATIVE, PYTORCH, KernelChoice


def native_choices() -> dict[str, KernelChoice]:
    """Choices of our kernels, as if trials had found them faster; operations are the keys."""
    operations = (f"{kind} {dtype}" for kind in ("linear layers", "attention") for dtype in ("float32", "bfloat16"))
    return {operation: KernelChoice(operation, NATIVE, {NATIVE: 1.0, PYTORCH: 2.0}) for operation in operations}


@pytest.fixture(scope="module", autouse=True)
def _native_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for operation, choice in native_choices().items():
            patch.setitem(kernel_trial._choices, operation, choice)
        yield
