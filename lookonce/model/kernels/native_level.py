"""Finds the level of the native libraries that a process uses: a set of instructions with a name.

A process uses the best level that its processor has. LOOKONCE_NATIVE_LEVEL names a lower one, to test or measure it.
Needs torch, so only the services import this module.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from lookonce.errors import ConfigurationError
from lookonce.model.kernels.native_compiler import NativeLevel, machine_levels

_VARIABLE = "LOOKONCE_NATIVE_LEVEL"


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
