"""The ctypes structures have the fields of the C++ structures, in their order and of their types."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator

import pytest

from decoder_svc.runner.cpu import native_structures
from decoder_svc.runner.cpu.attention import SOURCES
from decoder_svc.runner.cpu.native_structures import PHASES
from lookonce.model.kernels import native_linear

# Structures whose names differ, C++ to Python.
NAMES = {"LayerOptions": "Options", "LowRank": "LowRankMatrices", "StateStep": "NativeStateStep"}
MIRRORED = (
    "BlockGroup", "Embeddings", "Experts", "ExpertStep", "Heads", "LayerAdapter", "LayerOptions", "Linear", "LowRank",
    "Pools", "Stack", "StackLayer", "StackStep", "StateStep", "Step", "StepAdapters",
)  # fmt: skip
_COMMENT = re.compile(r"//[^\n]*")
_STRUCT = re.compile(r"^struct (\w+) \{(.*?)^\};", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r"(?:const )?(\w+)(\*?) (\w+)(?:\[(\d+)\])?;")
# Enumerations have 64 bits.
_ENUMERATIONS = dict.fromkeys(("Activation", "CodeForm"), ctypes.c_int64)
_SCALARS = {"int64_t": ctypes.c_int64, "float": ctypes.c_float, **_ENUMERATIONS}


def sources() -> str:
    folders = (SOURCES, native_linear.SOURCES)
    text = "\n".join(path.read_text() for folder in folders for path in sorted(folder.iterdir()))
    return _COMMENT.sub("", text)


def structures() -> dict[str, str]:
    """Returns the bodies of the structures in the C++ sources by name."""
    return {match[1]: match[2] for match in _STRUCT.finditer(sources())}


def python_structure(name: str) -> type[ctypes.Structure]:
    structure: type[ctypes.Structure] = getattr(native_structures, NAMES.get(name, name))
    return structure


def declared_fields(body: str) -> Iterator[tuple[str, object]]:
    """Yields (name, kind) of each field of a C++ structure; a pointer has the kind "pointer"."""
    for kind, pointer, name, length in _FIELD.findall(body):
        if pointer:
            yield name, "pointer"
        elif kind in _SCALARS:
            yield name, _SCALARS[kind]
        else:
            one = python_structure(kind)
            yield name, (one, int(length)) if length else one


def mirrored_fields(structure: type[ctypes.Structure]) -> Iterator[tuple[str, object]]:
    """Yields (name, kind) of each field of a ctypes structure, with the same kinds."""
    for field in structure._fields_:
        name, kind = field[0], field[1]
        if kind is ctypes.c_void_p or issubclass(kind, ctypes._Pointer):
            yield name, "pointer"
        elif issubclass(kind, ctypes.Array):
            yield name, (kind._type_, kind._length_)
        else:
            yield name, kind


@pytest.mark.parametrize("name", MIRRORED)
def test_a_structure_has_the_fields_of_its_cpp_counterpart(name: str) -> None:
    body = structures()[name]
    declared = list(declared_fields(body))
    assert len(declared) == body.count(";"), "a declaration that this test cannot read"
    assert list(mirrored_fields(python_structure(name))) == declared


def test_every_structure_in_python_has_a_counterpart() -> None:
    names = {
        name
        for name, value in vars(native_structures).items()
        if isinstance(value, type) and issubclass(value, ctypes.Structure)
    }
    assert names == {NAMES.get(name, name) for name in MIRRORED}


def test_phases_are_in_the_order_of_the_cpp_enumeration() -> None:
    found = re.search(r"enum Phase \{([^}]*)\}", sources())
    assert found is not None
    names = [name.strip().removeprefix("k") for name in found[1].split(",")]
    assert names.pop() == "NumPhases"
    assert tuple(re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower() for name in names) == PHASES
