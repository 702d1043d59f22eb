"""Look-ups in rendered manifests, and the facts of the code that the manifests must agree with."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
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
from tests.k8s.render import Manifest, pod_templates

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
# Name of the pods with the ranks of a split model, whose decoder has the name of all decoders.
RANK = "lookonce-rank"


def find(manifests: Sequence[Manifest], kind: str, name: str) -> Manifest:
    """Returns the manifest of this kind and name."""
    (manifest,) = (one for one in of_kind(manifests, kind) if one["metadata"]["name"] == name)
    return manifest


def of_kind(manifests: Sequence[Manifest], kind: str) -> list[Manifest]:
    """Returns all manifests of this kind; there must be at least one."""
    found = [manifest for manifest in manifests if manifest["kind"] == kind]
    assert found, f"there is no {kind}"
    return found


def names(manifests: list[Manifest], kind: str) -> set[str]:
    """Returns the names of all manifests of this kind; there may be none."""
    return {one["metadata"]["name"] for one in manifests if one["kind"] == kind}


def owner(manifests: Sequence[Manifest], name: str) -> Manifest:
    """Returns the Deployment or LeaderWorkerSet that makes the pods of this name."""
    (found,) = (one for one in manifests if name in pod_templates(one))
    return found


def pods(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Returns the specifications of all pods by name."""
    return {name: template["spec"] for one in manifests for name, template in pod_templates(one).items()}


def pod(manifests: list[Manifest], name: str) -> Manifest:
    """Returns the specification of the pods of this name, which is that of their Deployment or LeaderWorkerSet."""
    return pods(manifests)[name]


def container(manifests: list[Manifest], name: str) -> Manifest:
    """Returns the only container in the pods of this name."""
    (one,) = pod(manifests, name)["containers"]
    found: Manifest = one
    return found


def environment(manifests: list[Manifest], case: ServiceCase) -> dict[str, str]:
    """Returns the environment variables of a service's container; values of Secrets come from FROM_SECRET."""
    return pod_environment(manifests, case.name)


def pod_environment(manifests: list[Manifest], name: str) -> dict[str, str]:
    """Returns the environment variables of the container in the pods of this name."""
    found: dict[str, str] = {}
    for source in container(manifests, name).get("envFrom", []):
        found |= find(manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
    made_by = owner(manifests, name)
    namespace = made_by["metadata"]["namespace"]
    return found | variables(container(manifests, name), namespace, manifests, group_variables(made_by))


def group_variables(manifest: Manifest) -> dict[str, str]:
    """Returns the variables that LeaderWorkerSet's controller sets in pods of the first group; none for other kinds.

    It sets them before those of the manifest, which may contain them.
    """
    if manifest["kind"] != "LeaderWorkerSet":
        return {}
    leader = f"{manifest['metadata']['name']}-0"
    return {
        "LWS_LEADER_ADDRESS": f"{leader}.{leader}.{manifest['metadata']['namespace']}",
        "LWS_GROUP_SIZE": str(manifest["spec"]["leaderWorkerTemplate"]["size"]),
    }


def variables(
    one: Manifest, namespace: str, manifests: Sequence[Manifest] = (), given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns the variables in `env` of a container as the kubelet sets them in this namespace.

    `manifests` are those with the config maps of the variables; without them, such variables are left out. `given` are
    variables that others set before.
    """
    found: dict[str, str] = {}
    for variable in one.get("env", []):
        name = variable["name"]
        # The API server refuses a variable with both.
        assert ("value" in variable) != ("valueFrom" in variable), name
        if "value" in variable:
            found[name] = expanded(variable["value"], {**(given or {}), **found})
        elif variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}:
            found[name] = namespace
        elif "configMapKeyRef" in variable["valueFrom"]:
            if manifests:
                reference = variable["valueFrom"]["configMapKeyRef"]
                found[name] = find(manifests, "ConfigMap", reference["name"])["data"][reference["key"]]
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
    return {port["name"]: port["containerPort"] for port in container(manifests, name).get("ports", [])}


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
    """Returns the labels of pods by the name of these pods."""
    return {name: template["metadata"]["labels"] for one in manifests for name, template in pod_templates(one).items()}
