"""The fixture that modules share in which `variant` is a fixture: what kustomize makes of it."""

from __future__ import annotations

import pytest

from tests.k8s.render import Manifest
from tests.k8s.variants import Variant, rendered


@pytest.fixture
def manifests(variant: Variant) -> list[Manifest]:
    """The manifests of the module's variant."""
    return rendered(variant)
