"""Services import torchvision for models that need it alone, even where its compiled operators do not load."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tests.torchvision_families import INSTALLED

# Importing torchvision's wheel for CUDA beside PyTorch for CPUs does this.
NO_OPERATORS = 'raise RuntimeError("operator torchvision::nms does not exist")'

IMPORTS = """
import sys
from lookonce.model.libraries.lean_transformers import import_lean_transformers
import_lean_transformers(needs_torchvision={needs})
import transformers
print(transformers.utils.is_torchvision_available(), "torchvision" in sys.modules)
"""
RESIZES = """
import PIL.Image
images = transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=8)
print(images.backend, tuple(images(PIL.Image.new("RGB", (20, 30)), return_tensors="pt")["pixel_values"].shape))
"""
IMPORTS_LATER = """
from lookonce.model.libraries.torchvision_import import import_torchvision
print(import_torchvision().__name__, "torchvision" in sys.modules)
"""


def lines_of(program: str, path: pathlib.Path) -> list[str]:
    """Runs a program in a process that finds packages in `path`, too; returns its lines."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(path)!r})\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_model_that_does_not_need_it_does_not_import_it() -> None:
    program = IMPORTS.format(needs=False) + IMPORTS_LATER
    assert lines_of(program, INSTALLED) == ["False False", "torchvision True"]


def test_a_model_that_needs_it_gets_it() -> None:
    assert lines_of(IMPORTS.format(needs=True) + RESIZES, INSTALLED) == ["True True", "torchvision (1, 3, 8, 8)"]


# The last one imports, but has no parts.
@pytest.mark.parametrize("content", [NO_OPERATORS, "raise SystemExit(3)", "raise OSError('no such library')", ""])
@pytest.mark.parametrize("needs", [False, True])
def test_where_it_cannot_be_imported_it_counts_as_not_installed(
    tmp_path: pathlib.Path, needs: bool, content: str
) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(content)
    assert lines_of(IMPORTS.format(needs=needs), tmp_path) == ["False False"]


def test_a_process_that_has_imported_it_before_keeps_it() -> None:
    program = "from lookonce.model.libraries.torchvision_import import import_torchvision; import_torchvision()"
    assert lines_of(program + IMPORTS.format(needs=False), INSTALLED) == ["True True"]
