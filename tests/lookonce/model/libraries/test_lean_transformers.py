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


# Both programs import torch, which takes 1.6 s of CPU. One process does, without collecting garbage, and each program
# runs in a copy of it.
RUNS_COPIES = """
import gc, os, sys
gc.disable()
import torch
for program in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        exec(program)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    print(flush=True)
"""


def outputs_of(*programs: str) -> list[list[str]]:
    """Runs each program in a process that has imported torch alone; returns their lines. Fails if one does."""
    arguments = map(textwrap.dedent, programs)
    done = subprocess.run(
        [sys.executable, "-c", RUNS_COPIES, *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return [lines.splitlines() for lines in done.stdout.split("\n\n")[:-1]]


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
    from lookonce.model.libraries.lean_transformers import import_lean_transformers
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
def lines() -> list[list[str]]:
    """The lines of a lean import (files opened, names, mask, work of the compiler) and of a plain one (names, mask)."""
    return outputs_of(LEAN + NAMES_AND_MASKS + COMPILED, NAMES_AND_MASKS)


def test_files_of_models_are_read_once_and_the_compiler_works_when_somebody_uses_it(lines: list[list[str]]) -> None:
    num_opened, _names, _mask, *of_compiler = lines[0]
    assert num_opened == "1"
    assert of_compiler == ["[1.0, 1.0]", "1", "True"]


def test_names_and_masks_that_need_the_compiler_s_class_are_those_of_a_plain_import(lines: list[list[str]]) -> None:
    lean, plain = lines
    assert lean[1:3] == plain
    assert len(plain) == 2


def test_the_compiler_works_after_a_library_has_imported_parts_of_it_meanwhile() -> None:
    """Transformers imports torchvision, where it is installed, and torchvision imports parts of the compiler."""
    meanwhile = """
        from lookonce.model.libraries import lean_transformers
        import_models = lean_transformers._import_models
        def with_library():
            import torch._dynamo.utils
            import_models()
        lean_transformers._import_models = with_library
        lean_transformers.import_lean_transformers()
        import torch
        print(torch.compiler.disable(lambda: 5)())
    """
    assert outputs_of(textwrap.dedent(meanwhile) + textwrap.dedent(COMPILED)) == [["5", "[1.0, 1.0]", "1", "True"]]
