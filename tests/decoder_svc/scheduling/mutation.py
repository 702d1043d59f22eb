"""Faults that are seeded into the product, each by its name, so that tests can show that they would be noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

NUM_SEEDS = 60
Patch = pytest.MonkeyPatch
Mutation: TypeAlias = Callable[[Patch], None]


class Mutations(dict[str, Mutation]):
    """A registry of faults, used as a decorator of functions that each plant one."""

    def __call__(self, apply: Mutation) -> Mutation:
        """Registers a fault under its function's name."""
        self[apply.__name__] = apply
        return apply
