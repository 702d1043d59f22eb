"""Our Triton kernels in Triton's interpreter, which runs them on the CPU, one program after the other."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import pathlib
import sys
from importlib.util import find_spec
from typing import Any

import pytest

# The folder into which `make venv` installs Triton, apart from the packages that services import.
TRITON_FOLDER = pathlib.Path(sys.prefix) / "triton"
# Kernels that were compiled for GPUs that are not here.
COMPILED_FOLDER = pathlib.Path(sys.prefix) / "triton-compiled"

if sys.platform != "linux":
    pytest.skip("there is no Triton for this system", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU, so kernels are compiled for it: `make bench-gpu` tests them", allow_module_level=True)
if find_spec("triton") is None:
    # A missing package fails: a skipped test would go unnoticed.
    assert TRITON_FOLDER.is_dir(), f"Triton is not in {TRITON_FOLDER}; `make venv` installs it"
    sys.path.append(str(TRITON_FOLDER))

from triton import language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

# Triton must be found first.
from decoder_svc.runner.cuda import (  # noqa: E402
    fused_stack,
    triton_attention,
    triton_layers,
    triton_penalties,
    triton_quantized,
    triton_recurrent,
    triton_splits,
    triton_writes,
)
from decoder_svc.runner.cuda.triton_attention import Tile, TritonBackend, latent_tile_of, tile_of  # noqa: E402
from lookonce.model.kernels import triton_rowwise  # noqa: E402

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


def _remember_types() -> None:
    """Makes the interpreter derive each type of block once, instead of for every operation of every program.

    Types are never changed, and two with the same name are the same. Deriving them takes half of the time that is left.
    """
    core = tl.core
    make_block_type, find_numpy_type = core.block_type.__init__, interpreter._get_np_dtype
    block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[str, tuple[Any, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def init_block_type(self: Any, element_type: Any, shape: Any) -> None:
        key = (element_type.name, *shape)
        if key not in block_types:
            make_block_type(self, element_type, shape)
            block_types[key] = vars(self).copy()
        vars(self).update(block_types[key])

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        if kind.name not in shapes:
            sizes = list(kind.shape) if kind.is_block() else []
            shapes[kind.name] = core.tuple(map(core.constexpr, sizes)), core.constexpr(math.prod(sizes))
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shapes[kind.name]

    def numpy_type(kind: Any) -> Any:
        if kind.name not in numpy_types:
            numpy_types[kind.name] = find_numpy_type(kind)
        return numpy_types[kind.name]

    core.block_type.__init__ = init_block_type
    core.tensor.__init__ = init_tensor
    interpreter._get_np_dtype = numpy_type


def _unwrap_quickly() -> None:
    """Makes the interpreter's most frequent function return at once where it has nothing to do."""
    core = tl.core
    unwrap = core._unwrap_if_constexpr
    plain = frozenset({core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)})

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    core._unwrap_if_constexpr = tl._unwrap_if_constexpr = unwrap_if_constexpr


def _match_operands_quickly() -> None:
    """Makes the interpreter give two operands one shape and type at once where they have them, or one is a number."""
    core, semantic = tl.core, interpreter.TritonSemantic
    broadcast = semantic.broadcast_impl_value
    check_types, make_constant = semantic.binary_op_type_checking_impl, semantic.scalar_constant
    # Types of two operands that every operator takes as they are.
    unchanged = frozenset({"int32", "int64", "fp32"})
    constants: dict[tuple[Any, ...], Any] = {}
    blocks: dict[tuple[Any, ...], Any] = {}
    kinds: dict[tuple[str, str], Any] = {}

    def broadcast_impl_value(self: Any, one: Any, other: Any) -> Any:
        first, second = one.type, other.type
        if not first.is_block():
            return (splat(self, one, second) if second.is_block() else one), other
        if not second.is_block():
            return one, splat(self, other, first)
        return (one, other) if first.shape.values == second.shape.values else broadcast(self, one, other)

    def splat(self: Any, scalar: Any, kind: Any) -> Any:
        """Returns a block of another block's shape, filled with a scalar."""
        key = (kind.name, scalar.dtype.name)
        if key not in kinds:
            kinds[key] = kind.with_element_ty(scalar.dtype)
        return self.tensor(self.builder.create_splat(kinds[key], scalar.handle), kinds[key])

    def binary_op_type_checking_impl(self: Any, one: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        if type(one) is core.tensor:
            name, kind = one.dtype.name, type(other)
            if kind is core.tensor:
                is_offset = other.dtype.name in unchanged and args[:1] == (True,) and one.dtype.is_ptr()
                if (is_offset and other.dtype.name != "fp32") or name == other.dtype.name in unchanged:
                    return self.broadcast_impl_value(one, other)
            elif (kind is int and name in unchanged and abs(other) < 1 << 31) or (kind is float and name == "fp32"):
                return one, like(self, one, other)
        return check_types(self, one, other, *args, **kwargs)

    def like(self: Any, one: Any, value: float) -> Any:
        """Returns a block of one value in the shape and type of another block, made once."""
        # 0.0 and -0.0 are equal, but not the same.
        key = (type(value), value or str(value), one.type.name)
        if key not in blocks:
            blocks[key] = broadcast(self, one, make_constant(self, value, one.dtype))[1]
        return blocks[key]

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        key = (type(value), value, dtype.name)
        if key not in constants:
            constants[key] = make_constant(self, value, dtype)
        return constants[key]

    semantic.broadcast_impl_value = broadcast_impl_value
    semantic.binary_op_type_checking_impl = binary_op_type_checking_impl
    semantic.scalar_constant = scalar_constant


def _call_builtins_directly() -> None:
    """Makes the interpreter find the functions of Triton's language once, and call them through one function, not two.

    By itself it lists the members of every module for each launch.
    """
    found: dict[int, list[tuple[str, Any]]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in found:
            members = inspect.getmembers(package)
            found[id(package)] = [(name, direct(member)) for name, member in members if tl.core.is_builtin(member)]
        for name, function in found[id(package)]:
            scope.set_attr(package, name, function)

    def direct(member: Any) -> Any:
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return function(*args, **kwargs, _semantic=semantic)

        return call

    interpreter._patch_builtin = patch_builtin


_patch_once_per_launch()
_drop_overflow_checks()
_call_builtins_directly()
_remember_types()
_unwrap_quickly()
_match_operands_quickly()


def interpreted(num_processors: int = FEW) -> TritonBackend:
    """Returns a backend whose pools are on the CPU."""
    return TritonBackend(num_processors)


__all__ = [
    "COMPILED_FOLDER",
    "FEW",
    "MANY",
    "SOME",
    "TRITON_FOLDER",
    "Tile",
    "TritonBackend",
    "fused_stack",
    "interpreted",
    "latent_tile_of",
    "tile_of",
    "triton_attention",
    "triton_layers",
    "triton_penalties",
    "triton_quantized",
    "triton_recurrent",
    "triton_rowwise",
    "triton_splits",
    "triton_writes",
]
