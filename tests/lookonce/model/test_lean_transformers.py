"""Services import transformers without PyTorch's compiler, and faster; whoever needs the compiler still gets it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from lookonce.client import Client
from lookonce.images import ImageRef
from lookonce.local.local_stack import LocalStack
from tests.e2e.pictures import fresh

# Packages of the compiler and of distributed tensors, with the library that they use for symbolic sizes.
HEAVY = ("torch._dynamo.variables", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy")
# Libraries for files that this stack does not have: certificates, and the keys of a sealed cache.
ENCRYPTION = ("cryptography.x509", "cryptography.hazmat.primitives.ciphers.aead")


def output_of(program: str) -> str:
    """Runs a program in a process that has not imported torch, and returns its output. Fails if it does."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_running_service_has_imported_neither_the_compiler_nor_encryption(stack: LocalStack) -> None:
    with Client.connect(stack.decoder_targets[0]) as client:
        client.generate("What is it?", images=[ImageRef.from_bytes(fresh(1)[0].data)])
    for process in (stack.encoders[0], stack.decoders[0]):
        imported = {line.rpartition("|")[2].strip() for line in process.log_path.read_text().splitlines()}
        assert "transformers.modeling_utils" in imported
        assert imported.isdisjoint((*HEAVY, *ENCRYPTION)), process.name


LEAN = """
    import sys
    opened = []
    sys.addaudithook(lambda event, found: opened.append(str(found[0])) if event == "open" else None)
    from lookonce.model.lean_transformers import import_lean_transformers
    import_lean_transformers()
    print(sum(name.endswith("modeling_clipseg.py") for name in opened))
"""
NAMES_AND_MASKS = """
    import torch
    import transformers.models
    print(sorted(transformers.__all__), sorted(transformers.models.__all__))
    from transformers.masking_utils import and_masks, causal_mask_function, sdpa_mask
    rows = torch.tensor([[0, 0, 1, 1, 2]])
    same = lambda batch, head, query, key: rows[batch, query] == rows[batch, key]
    mask = sdpa_mask(
        batch_size=1, q_length=5, kv_length=5, mask_function=and_masks(causal_mask_function, same), use_vmap=True,
        allow_is_causal_skip=False,
    )
    print(mask.int().tolist())
"""
COMPILED = """
    print(torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(torch.zeros(2)).tolist())
    print(torch._dynamo.utils.counters["stats"]["calls_captured"])
    print(torch.distributed.is_available())
"""


@pytest.fixture(scope="module")
def lean_lines() -> list[str]:
    """The lines that one process prints: files opened, names, a mask, and the work of the compiler."""
    return output_of(LEAN + NAMES_AND_MASKS + COMPILED).splitlines()


def test_files_of_models_are_read_once_and_the_compiler_works_when_somebody_uses_it(lean_lines: list[str]) -> None:
    num_opened, _names, _mask, *of_compiler = lean_lines
    assert num_opened == "1"
    assert of_compiler == ["[1.0, 1.0]", "1", "True"]


def test_names_and_masks_that_need_the_compiler_s_class_are_those_of_a_plain_import(lean_lines: list[str]) -> None:
    plain = output_of(NAMES_AND_MASKS).splitlines()
    assert lean_lines[1:3] == plain
    assert len(plain) == 2
