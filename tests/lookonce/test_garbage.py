"""The collector rests while long-lived objects are made, forgets them, and is what it was afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from lookonce.garbage import long_lived_objects

# In a process of its own: frozen objects stay frozen.
_FREEZES = """
import gc
from lookonce.garbage import long_lived_objects
frozen = gc.get_freeze_count()
with long_lived_objects():
    assert not gc.isenabled()
    kept = [[] for _ in range(1000)]
assert gc.isenabled() and gc.get_freeze_count() >= frozen + 1000
"""


def test_objects_made_inside_are_kept_from_the_collector() -> None:
    subprocess.run([sys.executable, "-c", _FREEZES], check=True, timeout=60)


def test_a_failure_freezes_nothing() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ValueError, match="no model"), long_lived_objects():
        raise ValueError("no model")
    assert gc.isenabled()
    # Some that were frozen before may have ended meanwhile.
    assert gc.get_freeze_count() <= frozen
