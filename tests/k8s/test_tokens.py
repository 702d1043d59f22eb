"""Tests of the component tokens: accepted and sent tokens come from Secrets, which may change while pods run."""

from __future__ import annotations

import pathlib
import re

import pytest

from lookonce.local.token_entry import new_token
from lookonce.server.admission.authentication import parse_tokens
from tests.k8s.manifests import CASES, DECODER, ServiceCase, container, parsed_settings, pod
from tests.k8s.render import Manifest
from tests.k8s.variants import K8S, PROD_ALL, TOKENS, Variant, rendered

_COMMENT = (K8S / "components/tokens/kustomization.yaml").read_text("utf-8")


@pytest.fixture(params=[TOKENS, PROD_ALL], ids=str)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    variant: Variant = request.param
    return rendered(variant)


def _secret_of(manifests: list[Manifest], case: ServiceCase, path: pathlib.PurePath) -> str:
    """Returns the Secret that is mounted as the folder of this file, so that changes reach a running pod."""
    one = container(manifests, case.name)
    (mount,) = (mount for mount in one["volumeMounts"] if mount["mountPath"] == str(path.parent))
    # With a subPath, the kubelet would never update the file.
    assert set(mount) == {"name", "mountPath", "readOnly"}
    (volume,) = (volume for volume in pod(manifests, case.name)["volumes"] if volume["name"] == mount["name"])
    # The user of the container does not own the files.
    assert volume["secret"]["defaultMode"] == 0o444
    name: str = volume["secret"]["secretName"]
    return name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_service_asks_for_tokens_of_the_same_secret(manifests: list[Manifest], case: ServiceCase) -> None:
    path = parsed_settings(manifests, case).auth_tokens_file
    assert path is not None
    assert f"secret generic {_secret_of(manifests, case, path)} --from-file={path.name}" in _COMMENT


def test_the_decoder_shows_encoders_a_token(manifests: list[Manifest]) -> None:
    path = parsed_settings(manifests, DECODER).encoder_token_file
    assert path is not None
    assert f"secret generic {_secret_of(manifests, DECODER, path)} --from-file={path.name}" in _COMMENT


def test_the_proposed_commands_make_tokens_that_services_take() -> None:
    commands = re.findall(r"lookonce token (\w+)(?: --tenant (\w+))?(?: --role (\w+))? >", _COMMENT)
    entries = [new_token(name, tenant, role or "client")[1] for name, tenant, role in commands]
    assert len(parse_tokens("".join(entries).encode())) == len(entries) == 2
    assert [role for *_, role in commands] == ["service", ""]
