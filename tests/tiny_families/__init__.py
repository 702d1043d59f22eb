"""A tiny model folder of every served family, for conformance tests; a new family adds a module.

Where torchvision is installed, only the families whose image processors need it are tested, and elsewhere all others.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from tests.torchvision_families import HAS_TORCHVISION, TORCHVISION_FAMILIES

_SHARED = "parts"

ALL_FAMILIES: dict[str, ModuleType] = {
    found.name: importlib.import_module(f"{__name__}.{found.name}")
    for found in pkgutil.iter_modules(__path__)
    if found.name != _SHARED
}
"""By name; each module has NAME, build(folder, *, seed=0) and load_processor(folder)."""
FAMILIES = {name: one for name, one in ALL_FAMILIES.items() if (name in TORCHVISION_FAMILIES) is HAS_TORCHVISION}
"""Those that are tested in this process."""
