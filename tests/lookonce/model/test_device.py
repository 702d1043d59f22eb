"""The PyTorch device that each value of `--device` selects."""

from __future__ import annotations

import pytest
import torch

from lookonce.errors import ConfigurationError
from lookonce.model.device import chosen_device


def test_without_a_cuda_device_auto_is_the_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen_device("auto") == chosen_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigurationError, match="--device"):
        chosen_device("cuda")


def test_a_cuda_device_is_taken_unless_the_cpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert chosen_device("auto") == chosen_device("cuda") == torch.device("cuda", 1)
    assert chosen_device("cpu") == torch.device("cpu")
