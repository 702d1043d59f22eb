"""A tiny model folder of every served family, for conformance tests; a new family adds a module."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

_SHARED = "parts"

FAMILIES: dict[str, ModuleType] = {
    found.name: importlib.import_module(f"{__name__}.{found.name}")
    for found in pkgutil.iter_modules(__path__)
    if found.name != _SHARED
}
"""By name; each module has NAME, build(folder, *, seed=0) and load_processor(folder)."""
