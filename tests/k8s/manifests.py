"""Look-ups in rendered manifests, and the facts of the code that the manifests must agree with."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from typing import Any

import pytest

from decoder_svc.__main__ import ENGINE_PART
from decoder_svc.settings import DecoderSettings
from encoder_svc.settings import EncoderSettings
from lookonce.decoder.v1 import decoder_service_pb2
from lookonce.encoder.v1 import encoder_service_pb2
from lookonce.server.settings import ServiceSettings
from lookonce.server.settings_parser import parse_settings
from tests.k8s.render import Manifest

APP = "app.kubernetes.io/name"
# Stands for values that a pod gets from a Secret, in the form that the setting expects.
FROM_SECRET = {"LOOKONCE_REDIS_URL": "rediss+sentinel://user:password@one:26379,two:26379/cache"}


@dataclass(frozen=True, slots=True)
class ServiceCase:
    """One gRPC service, with the facts that its manifests must agree with."""

    name: str
    settings_class: type[ServiceSettings]
    # Full name of the service in the proto file.
    full_name: str
    # Module that `python -m` runs.
    module: str
    # Health name of what a restart can repair.
    liveness_name: str


ENCODER = ServiceCase(
    "lookonce-encoder",
    EncoderSettings,
    encoder_service_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name,
    "encoder_svc",
    encoder_service_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name,
)
DECODER = ServiceCase(
    "lookonce-decoder",
    DecoderSettings,
    decoder_service_pb2.DESCRIPTOR.services_by_name["DecoderService"].full_name,
    "decoder_svc",
    ENGINE_PART,
)
CASES = (ENCODER, DECODER)


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Returns the manifest of this kind and name."""
    (manifest,) = (one for one in of_kind(manifests, kind) if one["metadata"]["name"] == name)
    return manifest


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """Returns all manifests of this kind; there must be at least one."""
    found = [manifest for manifest in manifests if manifest["kind"] == kind]
    assert found, f"there is no {kind}"
    return found


def names(manifests: list[Manifest], kind: str) -> set[str]:
    """Returns the names of all manifests of this kind; there may be none."""
    return {one["metadata"]["name"] for one in manifests if one["kind"] == kind}


def pod(manifests: list[Manifest], name: str) -> Manifest:
    """Returns the pod specification in the Deployment of this name."""
    found: Manifest = find(manifests, "Deployment", name)["spec"]["template"]["spec"]
    return found


def container(manifests: list[Manifest], name: str) -> Manifest:
    """Returns the only container in the pod of this Deployment."""
    (one,) = pod(manifests, name)["containers"]
    found: Manifest = one
    return found


def environment(manifests: list[Manifest], case: ServiceCase) -> dict[str, str]:
    """Returns the environment variables of a container; values of Secrets come from FROM_SECRET."""
    found: dict[str, str] = {}
    for source in container(manifests, case.name)["envFrom"]:
        found |= find(manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
    deployment = find(manifests, "Deployment", case.name)
    return found | variables(container(manifests, case.name), deployment["metadata"]["namespace"])


def variables(one: Manifest, namespace: str) -> dict[str, str]:
    """Returns the variables in `env` of a container as the kubelet sets them in this namespace."""
    found: dict[str, str] = {}
    for variable in one.get("env", []):
        name = variable["name"]
        # The API server refuses a variable with both.
        assert ("value" in variable) != ("valueFrom" in variable), name
        if "value" in variable:
            found[name] = expanded(variable["value"], found)
        elif variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}:
            found[name] = namespace
        else:
            assert set(variable["valueFrom"]) == {"secretKeyRef"}
            found[name] = FROM_SECRET[name]
    return found


def expanded(text: str, known: dict[str, str]) -> str:
    """Returns the text with $(NAME) replaced, as in variables and arguments of a container.

    Raises KeyError for a variable that is not defined before. The kubelet would leave such a text as it is.
    """
    return re.sub(r"\$\((\w+)\)", lambda match: known[match[1]], text)


def parsed_settings(manifests: list[Manifest], case: ServiceCase) -> Any:
    """Returns the settings that the service would parse in its pod. They are frozen."""
    return _parsed_settings(case, tuple(sorted(environment(manifests, case).items())))


@functools.cache
def _parsed_settings(case: ServiceCase, variables: tuple[tuple[str, str], ...]) -> Any:
    """Cached, because most variants leave a service's environment as it is, and one takes 30 ms to parse."""
    with pytest.MonkeyPatch.context() as patch:
        for key in [key for key in os.environ if key.startswith("LOOKONCE_")]:
            patch.delenv(key)
        for key, value in variables:
            patch.setenv(key, value)
        return parse_settings(case.settings_class, [], case.module)


def container_ports(manifests: list[Manifest], name: str) -> dict[str, int]:
    """Returns the numbers of the container's ports by name."""
    return {port["name"]: port["containerPort"] for port in container(manifests, name)["ports"]}


def service_port(manifests: list[Manifest], name: str, port_name: str) -> int:
    """Returns the number of a Service's port."""
    ports = find(manifests, "Service", name)["spec"]["ports"]
    (port,) = (port["port"] for port in ports if port["name"] == port_name)
    return int(port)


def port_of(address: str) -> int:
    """Returns the port number in a host:port address."""
    return int(address.rpartition(":")[2])


def patience_s(probe: dict[str, Any]) -> int:
    """Returns how long a probe must fail before Kubernetes acts; the default is 3 failures."""
    found: int = probe["periodSeconds"] * probe.get("failureThreshold", 3)
    return found


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Returns whether a label selector matches these labels. Supports only the forms that our manifests use."""
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def pod_labels(manifests: list[Manifest]) -> dict[str, dict[str, str]]:
    """Returns the labels of pods by the name of their Deployment."""
    return {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"]
        for one in of_kind(manifests, "Deployment")
    }
