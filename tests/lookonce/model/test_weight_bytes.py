"""The memory of weights: every tensor once, packed copies included."""

from __future__ import annotations

import pathlib

import pytest
import torch

from decoder_svc.runner.cpu.native_stack import NativeStack
from lookonce.model.half_model import text_child
from lookonce.model.weight_bytes import weight_bytes
from tests import tiny_models
from tests.decoder_svc.runner.cpu import loaded_runner


class Tied(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A table and a head with one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 10)
        self.head.weight = self.table.weight
        self.register_buffer("frequencies", torch.zeros(3, dtype=torch.float16))


class Own(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Weights in a structure of the module's own."""

    @property
    def nbytes(self) -> int:
        return 1000


def test_shared_weights_count_once_and_buffers_count() -> None:
    assert weight_bytes(Tied()) == (10 * 4 + 10) * 4 + 3 * 2


def test_element_types_decide() -> None:
    assert weight_bytes(Tied().to(torch.bfloat16)) == (10 * 4 + 10 + 3) * 2


def test_a_device_without_addresses_is_counted() -> None:
    with torch.device("meta"):
        model = Tied()
    assert weight_bytes(model) == weight_bytes(Tied())


def test_a_module_with_a_structure_of_its_own_reports_it() -> None:
    assert weight_bytes(torch.nn.Sequential(Own(), torch.nn.Linear(2, 3), Own())) == 2000 + (2 * 3 + 3) * 4


@pytest.mark.usefixtures("library")
def test_a_native_stack_reports_its_panels(tmp_path: pathlib.Path) -> None:
    runner = loaded_runner.load(tiny_models.build_llava_clip(tmp_path / "llava"), torch.float32)
    stack = getattr(runner.model.model, text_child(runner.model))
    assert isinstance(stack, NativeStack)
    table = stack.embed_tokens.weight.nbytes
    assert runner.weight_bytes == weight_bytes(runner.model) > stack.nbytes + table > table > 0
