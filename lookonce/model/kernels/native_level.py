"""The kinds of processors for which the native libraries are compiled: sets of instructions with a name.

A process uses the best level that its processor has. LOOKONCE_NATIVE_LEVEL names a lower one, to test or measure it.
Needs torch, so only the services import this module.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lookonce.errors import ConfigurationError

_VARIABLE = "LOOKONCE_NATIVE_LEVEL"
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_X86, _ARM = "x86_64", "aarch64"
_V3_FEATURES = frozenset({"avx2", "fma3", "bmi2", "f16c"})
_V4 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_V4_FEATURES = _V3_FEATURES | {"avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl"}
_PAIRS = "-mavx512bf16"
_PAIR_FEATURES = _V4_FEATURES | {"avx512_bf16"}


@dataclass(frozen=True, slots=True)
class NativeLevel:
    """A set of instructions that kernels are compiled for."""

    name: str
    # The architecture, as `platform.machine()` names it.
    machine: str
    # Flags of GCC and Clang.
    flags: tuple[str, ...]
    # Features that a processor must have, as PyTorch names them; those with a number as `name=number`.
    features: frozenset[str]


# Lowest first. x86-64 levels up to avx512 are those of its psABI. Compilers must know the length of SVE's vectors.
LEVELS = (
    NativeLevel("x86_64", _X86, (), frozenset()),
    NativeLevel("avx2", _X86, ("-march=x86-64-v3",), _V3_FEATURES),
    NativeLevel("avx512", _X86, _V4, _V4_FEATURES),
    NativeLevel("avx512_bf16", _X86, (*_V4, _PAIRS), _PAIR_FEATURES),
    NativeLevel(
        "amx_bf16", _X86, (*_V4, _PAIRS, "-mamx-tile", "-mamx-bf16"), _PAIR_FEATURES | {"amx_tile", "amx_bf16"}
    ),
    NativeLevel("neon", _ARM, (), frozenset()),
    NativeLevel("neon_bf16", _ARM, ("-march=armv8.2-a+bf16",), frozenset({"bf16"})),
    NativeLevel(
        "sve256_bf16",
        _ARM,
        ("-march=armv8.2-a+sve+bf16", "-msve-vector-bits=256"),
        frozenset({"bf16", "sve_bf16", "sve_max_length=32"}),
    ),
)


def native_level(variables: Mapping[str, str] = os.environ) -> NativeLevel:
    """Returns the level that this process uses. Raises ConfigurationError for one that the processor does not have."""
    levels = processor_levels()
    name = variables.get(_VARIABLE)
    if not name:
        return levels[-1]
    for level in levels:
        if level.name == name:
            return level
    names = ", ".join(level.name for level in levels)
    raise ConfigurationError(f"{_VARIABLE} is {name!r}; this processor has {names}")


def processor_levels() -> tuple[NativeLevel, ...]:
    """Returns the levels that this processor has, lowest first; never empty."""
    found = {
        name if value is True else f"{name}={value}"
        for name, value in torch.cpu.get_capabilities().items()
        if value is not False
    }
    # The system lets a process use AMX only after a request, because of the size of its registers.
    if "amx_tile" in found and not torch.cpu._init_amx():
        found.remove("amx_tile")
    return tuple(level for level in machine_levels() if level.features <= found)


def machine_levels() -> tuple[NativeLevel, ...]:
    """Returns the levels of all processors of this machine's architecture, lowest first; the first needs no feature."""
    machine = platform.machine().lower()
    machine = _MACHINES.get(machine, machine)
    levels = tuple(level for level in LEVELS if level.machine == machine)
    return levels or (NativeLevel(machine, machine, (), frozenset()),)
