"""Tests of the component admin: its jobs, and no other pod, reach the operators' calls of encoders."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
from typing import Any

import pytest

from lookonce.local.token_entry import new_token
from lookonce.server.admission.authentication import parse_tokens
from tests.k8s.manifests import (
    ENCODER,
    container_ports,
    find,
    names,
    of_kind,
    parsed_settings,
    pod_labels,
    port_of,
    selects,
)
from tests.k8s.render import Manifest
from tests.k8s.variants import ADMIN, K8S, PROD_ALL, Variant, rendered

_COMMENTS = "".join((K8S / "components/admin" / name).read_text("utf-8") for name in ("kustomization.yaml", "job.yaml"))


@pytest.fixture(params=[ADMIN, PROD_ALL], ids=str)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    variant: Variant = request.param
    return rendered(variant)


def job_pod(manifests: list[Manifest]) -> Manifest:
    """Returns the pod template of the jobs."""
    template: Manifest = find(manifests, "CronJob", "lookonce-admin")["spec"]["jobTemplate"]["spec"]["template"]
    return template


def job_container(manifests: list[Manifest]) -> Manifest:
    """Returns the only container of a job."""
    (one,) = job_pod(manifests)["spec"]["containers"]
    found: Manifest = one
    return found


def test_the_template_never_runs_by_itself(manifests: list[Manifest]) -> None:
    assert find(manifests, "CronJob", "lookonce-admin")["spec"]["suspend"] is True


def test_encoders_serve_operators_calls_on_the_port_of_their_service(manifests: list[Manifest]) -> None:
    address = parsed_settings(manifests, ENCODER).admin_listen
    assert address is not None
    ports = find(manifests, "Service", "lookonce-encoder")["spec"]["ports"]
    assert {"name": "admin", "port": port_of(address), "targetPort": "admin"} in ports


def test_a_job_calls_the_command_with_its_images_and_its_tenant(
    manifests: list[Manifest], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "python").write_text('#!/bin/sh\nfor one in "$@"; do echo "$one"; done\n')
    (tmp_path / "python").chmod(0o755)
    one = job_container(manifests)
    values = {variable["name"]: variable["value"] for variable in one["env"] if "value" in variable}
    environment = {**os.environ, **values, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment |= {"IMAGES": "a1 b2 *", "NAMESPACE": "somewhere", "TENANT": "acme co"}
    finished = subprocess.run(one["command"], env=environment, capture_output=True, text=True, check=True, timeout=30)
    port = port_of(str(parsed_settings(manifests, ENCODER).admin_listen))
    target = f"lookonce-encoder.somewhere:{port}"
    assert finished.stdout.splitlines() == [
        *("-m", "lookonce.cli", "cache", "evict", "--target", target, "--tenant", "acme co", "a1", "b2", "*")
    ]
    # The command refuses an empty tenant. Without one, it means the default tenant.
    without = {name: value for name, value in environment.items() if name != "TENANT"}
    for variables in (without, {**environment, "TENANT": ""}):
        finished = subprocess.run(one["command"], env=variables, capture_output=True, text=True, check=True, timeout=30)
        assert finished.stdout.splitlines() == [
            "-m",
            "lookonce.cli",
            "cache",
            "evict",
            "--target",
            target,
            "a1",
            "b2",
            "*",
        ]
    del environment["IMAGES"]
    failed = subprocess.run(one["command"], env=environment, capture_output=True, check=False, timeout=30)
    assert failed.returncode != 0, "a job without images must not look as if it had forgotten something"


def test_the_token_comes_from_the_secret_that_the_comment_names(manifests: list[Manifest]) -> None:
    (token,) = (one for one in job_container(manifests)["env"] if one["name"] == "LOOKONCE_TOKEN")
    secret = token["valueFrom"]["secretKeyRef"]
    assert f"secret generic {secret['name']} --from-file={secret['key']}" in _COMMENTS
    assert "optional" not in secret
    name, role = re.findall(r"lookonce token (\w+) --role (\w+) >", _COMMENTS)[0]
    (known,) = parse_tokens(new_token(name, "", role)[1].encode())
    assert known.identity.role.value == "operator"


def test_the_proposed_commands_name_what_the_job_reads(manifests: list[Manifest]) -> None:
    sources = [one["valueFrom"] for one in job_container(manifests)["env"] if "valueFrom" in one]
    maps = [source["configMapKeyRef"] for source in sources if "configMapKeyRef" in source]
    assert {one["name"] for one in maps} == {"lookonce-forget"}
    assert {one["key"]: one.get("optional", False) for one in maps} == {"images": False, "tenant": True}
    assert 'create configmap lookonce-forget --from-literal=images="' in _COMMENTS
    assert "--from=cronjob/lookonce-admin" in _COMMENTS


def test_a_job_has_the_least_rights_and_the_encoder_s_image(manifests: list[Manifest]) -> None:
    pod, one = job_pod(manifests)["spec"], job_container(manifests)
    encoder = find(manifests, "Deployment", "lookonce-encoder")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"] == encoder["securityContext"]
    assert one["securityContext"] == encoder["containers"][0]["securityContext"]
    assert one["image"] == encoder["containers"][0]["image"]
    assert {mount["name"] for mount in one["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_a_job_has_certificates_where_encoders_ask_for_them(manifests: list[Manifest]) -> None:
    variables = {one["name"]: one.get("value", "") for one in job_container(manifests)["env"]}
    asked = parsed_settings(manifests, ENCODER).tls_client_ca is not None
    assert {"LOOKONCE_TLS_CA", "LOOKONCE_TLS_CERT", "LOOKONCE_TLS_KEY"}.issubset(variables) is asked


def rules_on(manifests: list[Manifest], direction: str, labels: dict[str, str]) -> list[dict[str, Any]]:
    """Returns all rules of network policies that select a pod with these labels."""
    return [
        rule
        for policy in of_kind(manifests, "NetworkPolicy")
        if direction in policy["spec"]["policyTypes"] and selects(policy["spec"]["podSelector"], labels)
        for rule in policy["spec"].get(direction.lower(), [])
    ]


def test_only_jobs_reach_the_operators_calls() -> None:
    manifests = rendered(PROD_ALL)
    encoder, job = pod_labels(manifests)["lookonce-encoder"], job_pod(manifests)["metadata"]["labels"]
    number = container_ports(manifests, "lookonce-encoder")["admin"]
    into = [rule for rule in rules_on(manifests, "Ingress", encoder) if _has_port(rule, number)]
    (rule,) = into
    (peer,) = rule["from"]
    assert set(peer) == {"podSelector"}
    assert selects(peer["podSelector"], job)
    assert not any(selects(peer["podSelector"], labels) for labels in pod_labels(manifests).values())
    assert rules_on(manifests, "Ingress", job) == [], "nobody connects to a job"
    out = [rule for rule in rules_on(manifests, "Egress", job) if not _has_port(rule, 53)]
    (rule,) = out
    assert [port["port"] for port in rule["ports"]] == ["admin"]
    (peer,) = rule["to"]
    assert [name for name, labels in pod_labels(manifests).items() if selects(peer["podSelector"], labels)] == [
        "lookonce-encoder"
    ]


def test_without_the_component_nobody_is_served() -> None:
    manifests = rendered(Variant("base"))
    assert not names(manifests, "CronJob")
    assert parsed_settings(manifests, ENCODER).admin_listen is None


def _has_port(rule: dict[str, Any], number: int) -> bool:
    return any(port["port"] in {"admin" if number != 53 else 53, number} for port in rule["ports"])
