"""Tests of the component leaderworkerset: a decoder and its ranks are one group, and ranks have the key and no more.

The validator of the other tests does not know the definition of LeaderWorkerSet. This module contains the parts of it
that we use, from its reference.
"""

from __future__ import annotations

import pathlib
import secrets
from typing import Any

import kubernetes_validate
import pytest

from decoder_svc.runner.parallel.rank_handshake import KEY_BYTES, read_key
from decoder_svc.settings import DecoderSettings, RankSettings
from lookonce.server.settings_parser import parse_settings
from tests.k8s.manifests import (
    DECODER,
    RANK,
    container,
    container_ports,
    find,
    names,
    of_kind,
    owner,
    parsed_settings,
    patience_s,
    pod,
    pod_environment,
    pod_labels,
    pods,
    port_of,
    selects,
)
from tests.k8s.render import Manifest, containers_in
from tests.k8s.test_network_policies import Peer, allows, own
from tests.k8s.variants import (
    BASE,
    DEV_CPU,
    GPU,
    K8S,
    LEADER_WORKER_SET,
    LEADER_WORKER_SET_AFFINITY,
    LEADER_WORKER_SET_PROD,
    Variant,
    build,
    proposed_patches,
    rendered,
    skip_without_tool,
    write_overlay,
)

_COMPONENT = K8S / "components/leaderworkerset"
_SET = "lookonce-decoder"
_KEY_SECRET = "lookonce-rank-key"
_HERE = {"kubernetes.io/metadata.name": "lookonce"}
_ALL = (LEADER_WORKER_SET, LEADER_WORKER_SET_PROD, LEADER_WORKER_SET_AFFINITY)
# Listeners of ranks have ports that the system chooses.
_PORTS = (50051, 50060, 9100, 40000)


@pytest.fixture(params=_ALL, ids=str)
def variant(request: pytest.FixtureRequest) -> Variant:
    one: Variant = request.param
    return one


@pytest.fixture(params=[LEADER_WORKER_SET_PROD, LEADER_WORKER_SET_AFFINITY], ids=str)
def guarded(request: pytest.FixtureRequest) -> list[Manifest]:
    """The variants with network policies."""
    return rendered(request.param)


def _group(manifests: list[Manifest]) -> Manifest:
    template: Manifest = find(manifests, "LeaderWorkerSet", _SET)["spec"]["leaderWorkerTemplate"]
    return template


def _rank_settings(manifests: list[Manifest]) -> RankSettings:
    """The settings that a rank parses in its pod."""
    environment = pod_environment(manifests, RANK)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        return parse_settings(RankSettings, [], "remote_rank")


def _decoder_settings(manifests: list[Manifest]) -> DecoderSettings:
    settings = parsed_settings(manifests, DECODER)
    assert isinstance(settings, DecoderSettings)
    return settings


def _secrets_of(one: Manifest) -> list[str]:
    """Returns the Secrets in the volumes of a pod."""
    sources = [volume.get("projected", {}).get("sources", []) for volume in one["volumes"]]
    return [volume["secret"]["secretName"] for volume in one["volumes"] if "secret" in volume] + [
        source["secret"]["name"] for each in sources for source in each if "secret" in source
    ]


def test_groups_run_in_place_of_the_deployment(manifests: list[Manifest]) -> None:
    assert _SET not in names(manifests, "Deployment")
    assert [one["metadata"]["name"] for one in of_kind(manifests, "LeaderWorkerSet")] == [_SET]
    assert {DECODER.name, RANK} <= set(pods(manifests))


def test_it_matches_the_controllers_schema(manifests: list[Manifest]) -> None:
    one = find(manifests, "LeaderWorkerSet", _SET)
    assert set(one) == {"apiVersion", "kind", "metadata", "spec"}
    assert one["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    spec = one["spec"]
    assert set(spec) == {"replicas", "startupPolicy", "networkConfig", "rolloutStrategy", "leaderWorkerTemplate"}
    assert set(_group(manifests)) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert set(spec["networkConfig"]) == {"subdomainPolicy"}
    assert set(spec["rolloutStrategy"]) == {"type", "rollingUpdateConfiguration"}
    roll_out = spec["rolloutStrategy"]["rollingUpdateConfiguration"]
    assert set(roll_out) == {"maxSurge", "maxUnavailable"}
    # The controller refuses two zeros.
    assert 0 < roll_out["maxSurge"] + roll_out["maxUnavailable"] < spec["replicas"]


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("template", ["leaderTemplate", "workerTemplate"])
def test_both_pods_are_valid(manifests: list[Manifest], template: str, version: str) -> None:
    one = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "any"}, "template": None}
    one["template"] = _group(manifests)[template]
    assert kubernetes_validate.validate(one, version, strict=True) == version


def test_ranks_start_before_the_decoder_is_ready(manifests: list[Manifest]) -> None:
    spec = find(manifests, "LeaderWorkerSet", _SET)["spec"]
    assert spec["startupPolicy"] == "LeaderCreated"
    # Otherwise the controller takes a Service of the set's name for its own. Ours has ready pods only.
    assert spec["networkConfig"]["subdomainPolicy"] == "UniquePerReplica"
    assert _SET in names(manifests, "Service")
    assert "publishNotReadyAddresses" not in find(manifests, "Service", _SET)["spec"]
    # The decoder waits for nodes and images of all its ranks, too.
    alone = patience_s(container(rendered(BASE), DECODER.name)["startupProbe"])
    assert patience_s(container(manifests, DECODER.name)["startupProbe"]) > alone


def test_pods_of_a_group_end_together(manifests: list[Manifest]) -> None:
    assert _group(manifests)["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert "restartPolicy" not in pod(manifests, RANK), "a controller's pods are always restarted"
    # The decoder may be told to end a little later than the rank, and drains.
    rank_s = pod(manifests, RANK)["terminationGracePeriodSeconds"]
    assert rank_s >= pod(manifests, DECODER.name)["terminationGracePeriodSeconds"] + 10


def test_clients_find_a_new_decoder_before_the_next_one_drains(manifests: list[Manifest]) -> None:
    wanted_s = find(rendered(BASE), "Deployment", DECODER.name)["spec"]["minReadySeconds"]
    assert _decoder_settings(manifests).drain_delay_s >= wanted_s


@pytest.mark.parametrize("variant", [LEADER_WORKER_SET_PROD, LEADER_WORKER_SET_AFFINITY], ids=str)
def test_the_leader_is_the_deployments_pod(variant: Variant) -> None:
    """Components that change the Deployment have their effect on leaders."""
    components = tuple(name for name in variant.components if not name.startswith("leaderworkerset"))
    before = find(rendered(Variant(variant.start, components)), "Deployment", DECODER.name)["spec"]["template"]
    after = _group(rendered(variant))["leaderTemplate"]
    assert after["metadata"] == before["metadata"]
    old, new = before["spec"], after["spec"]
    changed = {"containers", "volumes", "topologySpreadConstraints", "terminationGracePeriodSeconds"}
    assert {key for key in old | new if old.get(key) != new.get(key)} == changed
    for field in ("volumes", "topologySpreadConstraints"):
        assert [one for one in new[field] if one in old[field]] == old[field]
    (old_one,), (new_one,) = old["containers"], new["containers"]
    assert {key for key in old_one | new_one if old_one.get(key) != new_one.get(key)} == {
        "env",
        "ports",
        "startupProbe",
        "volumeMounts",
    }
    for field in ("env", "ports", "volumeMounts"):
        assert [one for one in new_one[field] if one in old_one[field]] == old_one[field]
        assert len(new_one[field]) == len(old_one[field]) + 1


def test_the_number_of_ranks_is_the_size_of_the_group(manifests: list[Manifest]) -> None:
    assert _decoder_settings(manifests).tensor_parallel_size == _group(manifests)["size"] == 2


def test_the_proposed_patch_changes_the_number_of_ranks(tmp_path: pathlib.Path) -> None:
    skip_without_tool()
    patches = proposed_patches(_COMPONENT / "kustomization.yaml", indent=15)
    write_overlay(tmp_path, LEADER_WORKER_SET, patches=patches)
    manifests = build(tmp_path)
    assert _decoder_settings(manifests).tensor_parallel_size == _group(manifests)["size"] == 4


def test_ranks_call_the_leader_of_their_group(manifests: list[Manifest]) -> None:
    one = container(manifests, RANK)
    assert one["command"] == ["python", "-m", "decoder_svc.remote_rank"]
    assert (K8S.parent / "decoder_svc/remote_rank.py").is_file()
    host, _, port = _rank_settings(manifests).leader.rpartition(":")
    namespace = find(manifests, "LeaderWorkerSet", _SET)["metadata"]["namespace"]
    assert host == f"{_SET}-0.{_SET}-0.{namespace}"
    listen = _decoder_settings(manifests).rank_listen
    assert listen == f"0.0.0.0:{port}"
    assert container_ports(manifests, DECODER.name)["ranks"] == port_of(listen)


def test_decoder_and_ranks_have_one_key(manifests: list[Manifest]) -> None:
    paths = {
        DECODER.name: _decoder_settings(manifests).rank_key_file,
        RANK: _rank_settings(manifests).rank_key_file,
    }
    for name, path in paths.items():
        assert path is not None
        (mount,) = (one for one in container(manifests, name)["volumeMounts"] if one["mountPath"] == str(path.parent))
        assert mount["readOnly"]
        (volume,) = (one for one in pod(manifests, name)["volumes"] if one["name"] == mount["name"])
        # The user of the container does not own the file.
        assert volume["secret"] == {"secretName": _KEY_SECRET, "defaultMode": 0o444}
        assert path.name == "key"


def test_the_proposed_command_makes_such_a_key(tmp_path: pathlib.Path) -> None:
    command = (
        "kubectl --namespace lookonce create secret generic lookonce-rank-key "
        f"--from-literal=key=$(openssl rand -hex {KEY_BYTES})"
    )
    for path in (
        K8S / "overlays/leaderworkerset/kustomization.yaml",
        _COMPONENT / "kustomization.yaml",
        K8S.parent / "docs/operations/deploying.md",
    ):
        assert command in path.read_text("utf-8")
    (tmp_path / "key").write_text(secrets.token_hex(KEY_BYTES))
    assert len(read_key(tmp_path / "key")) == KEY_BYTES


def test_ranks_get_no_setting_and_no_secret_of_the_decoder(manifests: list[Manifest]) -> None:
    one = pod(manifests, RANK)
    assert _secrets_of(one) == [_KEY_SECRET]
    # The model and a folder for temporary files are the only other volumes.
    assert {volume["name"] for volume in one["volumes"]} == {"model", "tmp", "rank-key"}
    for each in containers_in(one):
        assert "envFrom" not in each
        for variable in each.get("env", []):
            assert set(variable.get("valueFrom", {})) <= {"configMapKeyRef"}
    fields = {f"LOOKONCE_{name.upper()}" for name in RankSettings.model_fields}
    assert set(pod_environment(manifests, RANK)) <= fields | {"HF_HUB_OFFLINE", "HOME"}


def test_ranks_serve_nothing(manifests: list[Manifest]) -> None:
    assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"} & set(
        container(manifests, RANK)
    )


def test_ranks_have_image_model_threads_and_rights_of_the_decoder(manifests: list[Manifest]) -> None:
    decoder, rank = container(manifests, DECODER.name), container(manifests, RANK)
    for field in ("image", "resources", "securityContext"):
        assert rank[field] == decoder[field]
    whole, part = pod(manifests, DECODER.name), pod(manifests, RANK)
    for field in ("securityContext", "automountServiceAccountToken", "enableServiceLinks"):
        assert part[field] == whole[field]
    assert part.get("initContainers") == whole.get("initContainers")
    models = [[volume for volume in one["volumes"] if volume["name"] == "model"] for one in (whole, part)]
    assert models[0] == models[1]
    settings = _rank_settings(manifests)
    assert settings.num_threads == _decoder_settings(manifests).num_threads
    (mount,) = (one for one in rank["volumeMounts"] if one["name"] == "model")
    assert mount == {"name": "model", "mountPath": str(settings.model), "readOnly": True}
    assert settings.model == _decoder_settings(manifests).model


def test_ranks_follow_the_decoder_of_another_overlay(tmp_path: pathlib.Path) -> None:
    skip_without_tool()
    write_overlay(tmp_path, Variant(DEV_CPU.start, ("leaderworkerset",)))
    manifests = build(tmp_path)
    assert _rank_settings(manifests).num_threads == 1
    expected = container(rendered(DEV_CPU), DECODER.name)["resources"]
    assert container(manifests, RANK)["resources"] == container(manifests, DECODER.name)["resources"] == expected


def test_each_pod_of_a_group_may_have_a_gpu(tmp_path: pathlib.Path) -> None:
    skip_without_tool()
    write_overlay(tmp_path, Variant(GPU.start, ("leaderworkerset",)))
    manifests = build(tmp_path)
    assert _decoder_settings(manifests).device == "cuda"
    alone = pod(rendered(GPU), DECODER.name)
    # Kernels are compiled for the GPU there.
    folders = [one for one in alone["volumes"] if one["name"] == "tmp"]
    for name in (DECODER.name, RANK):
        assert container(manifests, name)["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert pod(manifests, name)["tolerations"] == alone["tolerations"]
        assert [one for one in pod(manifests, name)["volumes"] if one["name"] == "tmp"] == folders


def test_the_model_image_may_be_given_by_its_digest(tmp_path: pathlib.Path) -> None:
    skip_without_tool()
    digest = "sha256:" + "0123456789abcdef" * 4
    images = [
        {"name": name, "newName": f"registry.example/{name}", "digest": digest} for name in (_SET, "lookonce-model")
    ]
    write_overlay(tmp_path, Variant("base", ("model-image-volume", "leaderworkerset")), images=images)
    manifests = build(tmp_path)
    for name in (DECODER.name, RANK):
        (volume,) = (one for one in pod(manifests, name)["volumes"] if one["name"] == "model")
        assert volume["image"]["reference"] == f"registry.example/lookonce-model@{digest}"
        assert container(manifests, name)["image"] == f"registry.example/{_SET}@{digest}"


def test_pods_of_a_group_run_on_different_nodes(manifests: list[Manifest]) -> None:
    strict = []
    for name in (DECODER.name, RANK):
        rules = pod(manifests, name)["topologySpreadConstraints"]
        strict += [rule for rule in rules if rule["whenUnsatisfiable"] == "DoNotSchedule"]
    one, other = strict
    assert one == other
    assert (one["topologyKey"], one["maxSkew"]) == ("kubernetes.io/hostname", 1)
    # A label that LeaderWorkerSet gives to the pods of one group.
    assert one["matchLabelKeys"] == ["leaderworkerset.sigs.k8s.io/group-key"]
    labels = pod_labels(manifests)
    assert {name for name in labels if selects(one["labelSelector"], labels[name])} == {DECODER.name, RANK}


def test_services_lead_to_decoders_and_not_to_ranks(manifests: list[Manifest]) -> None:
    labels = pod_labels(manifests)
    assert find(manifests, "Service", DECODER.name)["spec"]["selector"].items() <= labels[DECODER.name].items()
    for service in of_kind(manifests, "Service"):
        assert not service["spec"]["selector"].items() <= labels[RANK].items()


def test_one_budget_counts_decoders_and_ranks(manifests: list[Manifest]) -> None:
    labels = pod_labels(manifests)
    # The API refuses to evict a pod that two budgets meet.
    for name in (DECODER.name, RANK):
        found = [
            one for one in of_kind(manifests, "PodDisruptionBudget") if selects(one["spec"]["selector"], labels[name])
        ]
        assert [one["metadata"]["name"] for one in found] == [DECODER.name]
        # The eviction of one pod ends its group, and until that is there again, no other is evicted.
        assert found[0]["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize(
    ("variant", "kind"),
    [(LEADER_WORKER_SET_PROD, "HorizontalPodAutoscaler"), (LEADER_WORKER_SET_AFFINITY, "ScaledObject")],
    ids=str,
)
def test_autoscalers_change_the_number_of_groups(variant: Variant, kind: str) -> None:
    manifests = rendered(variant)
    made_by = owner(manifests, DECODER.name)
    target = find(manifests, kind, DECODER.name)["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": made_by["apiVersion"], "kind": made_by["kind"], "name": _SET}
    assert find(manifests, kind, "lookonce-encoder")["spec"]["scaleTargetRef"]["kind"] == "Deployment"


def test_a_second_instance_has_a_set_of_its_own(tmp_path: pathlib.Path) -> None:
    skip_without_tool()
    write_overlay(tmp_path, LEADER_WORKER_SET, nameSuffix="-b")
    manifests = build(tmp_path)
    assert names(manifests, "LeaderWorkerSet") == {f"{_SET}-b"}
    assert pod_environment(manifests, f"{RANK}-b")["LOOKONCE_LEADER"].startswith(f"{_SET}-b-0.{_SET}-b-0.lookonce:")
    assert find(manifests, "ConfigMap", f"{_SET}-b")


@pytest.mark.parametrize("port", _PORTS)
def test_pods_of_a_group_reach_each_other_on_all_ports(guarded: list[Manifest], port: int) -> None:
    group = (DECODER.name, RANK)
    for caller in group:
        for called in group:
            assert allows(guarded, "Egress", caller, own(guarded, called), port, port)
            assert allows(guarded, "Ingress", called, own(guarded, caller), port, port)


@pytest.mark.parametrize("port", _PORTS)
def test_nobody_else_reaches_a_rank(guarded: list[Manifest], port: int) -> None:
    others: list[Peer] = [own(guarded, name) for name in pod_labels(guarded) if name not in (DECODER.name, RANK)]
    others += [
        Peer({}, {"kubernetes.io/metadata.name": "shop", "lookonce-client": "true"}),
        Peer({}, {"kubernetes.io/metadata.name": "monitoring"}),
        Peer({}, _HERE),
        Peer({}, {}, "10.1.2.3"),
        # Other instances, here and in another namespace.
        Peer({**pod_labels(guarded)[RANK], "app.kubernetes.io/instance": "lookonce-b"}, _HERE),
        Peer(pod_labels(guarded)[RANK], {"kubernetes.io/metadata.name": "other"}),
    ]
    assert len(others) >= 8
    for other in others:
        for name in ("grpc", "metrics", "http", "any"):
            assert not allows(guarded, "Ingress", RANK, other, name, port)


def test_a_rank_reaches_its_group_and_dns_alone(guarded: list[Manifest]) -> None:
    others: list[Peer] = [own(guarded, name) for name in pod_labels(guarded) if name not in (DECODER.name, RANK)]
    others += [Peer({}, {"kubernetes.io/metadata.name": "observability"}), Peer({}, {}, "10.1.2.3")]
    ports: dict[str, Any] = {"grpc": 50051, "redis": 6379, "sentinel": 26379, "otlp": 4317, "https": 443}
    for other in others:
        for name, port in ports.items():
            assert not allows(guarded, "Egress", RANK, other, name, port)
    server = Peer({"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"})
    assert allows(guarded, "Egress", RANK, server, "dns", 53)


def test_without_their_policy_ranks_reach_nobody() -> None:
    components = tuple(name for name in LEADER_WORKER_SET_PROD.components if name != "networkpolicy/ranks")
    manifests = rendered(Variant(LEADER_WORKER_SET_PROD.start, components))
    for name in (DECODER.name, RANK):
        assert not allows(manifests, "Egress", name, own(manifests, DECODER.name), "ranks", 50060)
        assert not allows(manifests, "Ingress", name, own(manifests, RANK), "ranks", 50060)
