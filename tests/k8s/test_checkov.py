"""Runs Checkov on all manifests. Checkov has dependencies of its own, so install it in a separate environment."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
import subprocess
import tempfile
from typing import Any

import pytest
import yaml

from tests.k8s.variants import VARIANTS, Variant, rendered

_TIMEOUT_S = 300
# Rules that we do not follow, with the reasons.
_SKIPPED = {
    "CKV_K8S_11": "no CPU limits: a quota stops all threads of a step at once, and each of them waits for the others",
    "CKV_K8S_15": "tags are versions and never move, so a node that has the image can restart it without the registry",
    "CKV_K8S_43": "images are built by whoever deploys; a digest, too, is set in an overlay's `images`",
    "CKV_K8S_35": "settings are variables of the environment; the URL of a managed Redis holds its password",
}
# Network policies are a component: not every cluster enforces them, and Redis may be anywhere.
_WITHOUT_POLICIES = "CKV2_K8S_6"


@functools.cache
def failed_checks(variant: Variant) -> list[dict[str, Any]]:
    """Checks each variant separately, because network policies of one would cover the pods of another."""
    command = shutil.which("checkov")
    if command is None:
        pytest.skip("checkov is not installed; it is a Python package, for an environment of its own")
    manifests = rendered(variant)
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "manifests.yaml").write_text(yaml.safe_dump_all(manifests))
        finished = subprocess.run(
            [command, "--directory", folder, "--framework", "kubernetes", "--skip-download", "--output", "json"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    found = json.loads(finished.stdout)
    assert found["summary"]["parsing_errors"] == 0
    assert found["summary"]["passed"] > 100, "it has looked at something"
    failed: list[dict[str, Any]] = found["results"]["failed_checks"]
    return failed


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_checkov_finds_nothing_except_the_skipped_rules(variant: Variant) -> None:
    skipped = set(_SKIPPED)
    if "networkpolicy" not in variant.components:
        skipped.add(_WITHOUT_POLICIES)
    said = {
        f"{check['check_id']} {check['resource']}: {check['check_name']}"
        for check in failed_checks(variant)
        if check["check_id"] not in skipped
    }
    assert said == set()


def test_every_rule_that_is_skipped_says_something() -> None:
    """Every skipped rule would fail. Otherwise the skip list is longer than necessary."""
    found = {check["check_id"] for variant in VARIANTS for check in failed_checks(variant)}
    assert found == {*_SKIPPED, _WITHOUT_POLICIES}
