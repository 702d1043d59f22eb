"""Tests that the rules for Prometheus parse, use exported series, link to the runbook, and fire when they should."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.observability.promql import asked, exported

ROOT = pathlib.Path(__file__).parents[2]
RULES = ROOT / "observability/rules"
TESTS = sorted((RULES / "tests").glob("*.yaml"))
RUNBOOK = "docs/operations/runbook.md"
COUNTER_FUNCTIONS = {"rate", "irate", "increase"}
TARGET_LABELS = {"instance", "job"}


def rules_of(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / name).read_text("utf-8"))["groups"]
    assert len({group["name"] for group in groups}) == len(groups)
    return [rule for group in groups for rule in group["rules"]]


RECORDING = rules_of("recording.yaml")
ALERTS = rules_of("alerts.yaml")
RECORDED = {rule["record"] for rule in RECORDING}

alerts = pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])


@pytest.mark.parametrize("rule", [*RECORDING, *ALERTS], ids=lambda rule: rule.get("record") or rule["alert"])
def test_an_expression_uses_only_exported_or_recorded_metrics(rule: dict[str, Any]) -> None:
    known = exported()
    found = asked(rule["expr"])
    assert found.names
    assert found.names - RECORDED <= set(known)
    for series, label in found.labels:
        assert label in known[series][1] | TARGET_LABELS
    for function, series in found.ranges:
        assert (known[series][0] == "counter") == (function in COUNTER_FUNCTIONS), series


def test_every_recorded_name_says_metric_and_operation_and_is_recorded_once() -> None:
    assert len(RECORDED) == len(RECORDING)
    for name in RECORDED:
        assert re.fullmatch(r"lookonce:[a-z_]+:(p\d+|rate|ratio)_\d+m", name), name


@alerts
def test_an_alert_has_a_severity_a_summary_and_a_runbook(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"Lookonce([A-Z][a-z0-9]+)+", rule["alert"])
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert set(rule["annotations"]) == {"summary", "runbook_url"}
    assert rule["annotations"]["summary"].endswith(".")
    assert rule["annotations"]["runbook_url"] == f"{RUNBOOK}#{rule['alert'].lower()}"


def test_the_runbook_has_a_paragraph_for_every_alert_and_for_no_other() -> None:
    page = (ROOT / RUNBOOK).read_text("utf-8")
    paragraphs = dict(re.findall(r"^## (\w+)\n\n(\w.+)$", page, re.MULTILINE))
    assert list(paragraphs) == re.findall(r"^#{2,} (.+)$", page, re.MULTILINE)
    assert list(paragraphs) == [rule["alert"] for rule in ALERTS]


@alerts
def test_an_alert_has_unit_tests_in_which_it_fires_and_in_which_it_never_does(rule: dict[str, Any]) -> None:
    checks = [
        [bool(check.get("exp_alerts")) for check in test["alert_rule_test"] if check["alertname"] == rule["alert"]]
        for path in TESTS
        for test in yaml.safe_load(path.read_text("utf-8"))["tests"]
        if "alert_rule_test" in test
    ]
    assert [one for one in checks if any(one)]
    assert [one for one in checks if one and not any(one)]


def test_every_recording_rule_has_a_unit_test() -> None:
    tests = yaml.safe_load((RULES / "tests/recording.yaml").read_text("utf-8"))["tests"]
    tested = {name for test in tests for check in test["promql_expr_test"] for name in asked(check["expr"]).names}
    assert tested == RECORDED


def test_unit_tests_feed_series_that_exist() -> None:
    known = exported()
    for path in TESTS:
        for test in yaml.safe_load(path.read_text("utf-8"))["tests"]:
            for series in test["input_series"]:
                found = asked(series["series"])
                assert found.names <= set(known), series
                for name, label in found.labels:
                    assert label in known[name][1] | TARGET_LABELS, series


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Prometheus' own checker, which comes with the server and not with a Python package."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool, which comes with Prometheus, is not on PATH")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    checked = promtool("check", "rules", *map(str, sorted(RULES.glob("*.yaml"))))
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_rules_fire_when_they_should(path: pathlib.Path) -> None:
    tested = promtool("test", "rules", str(path))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_a_rule_that_does_not_fire_is_found(tmp_path: pathlib.Path) -> None:
    for path in RULES.rglob("*.yaml"):
        copy = tmp_path / path.relative_to(RULES)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text("utf-8").replace("lookonce_serving == 0", "lookonce_serving == 7"))
    tested = promtool("test", "rules", str(tmp_path / "tests/services.yaml"))
    assert tested.returncode != 0
    assert "LookonceNotServing" in tested.stdout + tested.stderr
