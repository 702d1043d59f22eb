"""`lookonce config show`: the settings that a service would start with, and where each comes from."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Annotated

import typer
from pydantic import SecretStr

from lookonce.commands.options import AsJson
from lookonce.commands.output import print_json, print_rows
from lookonce.commands.running.services import Service, settings_class
from lookonce.server.settings import EnvironmentSettings
from lookonce.server.settings_parser import Origin, settings_with_origins

# Context settings of a command that hands flags on.
RAW_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}
# Addresses, which k8s/ sets in its own config maps and deployments.
_SET_BY_MANIFESTS = frozenset({
    "listen", "insecure", "admin_listen", "health_listen", "metrics_listen", "encoder_target", "decoder_target",
})  # fmt: skip
_K8S_HEAD = """\
# Settings of the {service}, for an overlay of k8s/ that lists this file under `patches`. Defaults are left out.
"""


def show(
    context: typer.Context,
    service: Annotated[Service, typer.Argument(help="encoder, decoder or gateway.")],
    k8s: Annotated[
        bool, typer.Option("--k8s", help="Print a ConfigMap for k8s/ with the settings that are given.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the settings that a service would start with. The service's own flags, if any, follow after --.

    Secrets are masked. Each value has its origin: flag, environment, file (--config FILE.toml) or default.
    """
    if k8s and as_json:
        raise typer.BadParameter("give --json or --k8s: each is a form of the output")
    arguments = context.args[1:] if context.args[:1] == ["--"] else context.args
    settings, origins = settings_with_origins(settings_class(service), arguments, f"{service}_svc")
    if k8s:
        sys.stdout.write(_config_map(service, settings, origins))
        return
    values = {name: _plain(getattr(settings, name)) for name in type(settings).model_fields}
    if as_json:
        print_json({name: {"value": value, "origin": origins[name]} for name, value in values.items()})
        return
    print_rows(("setting", "value", "origin"), [(name, _shown(value), origins[name]) for name, value in values.items()])


def _plain(value: object) -> object:
    """Returns a value as JSON has it; a secret becomes asterisks."""
    return str(value) if isinstance(value, pathlib.Path | SecretStr) else value


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _config_map(service: Service, settings: EnvironmentSettings, origins: Mapping[str, Origin]) -> str:
    """Returns a patch for the ConfigMap of the service in k8s/. Names the settings that do not belong into it."""
    lines, left_out = [], []
    for name, origin in origins.items():
        value = getattr(settings, name)
        if origin == "default" or value is None:
            continue
        reason = _reason_to_leave_out(name, value)
        if reason:
            left_out.append(f"# {name}: {reason}\n")
        else:
            lines.append(f"  LOOKONCE_{name.upper()}: {json.dumps(_shown(value))}\n")
    head = _K8S_HEAD.format(service=service)
    if left_out:
        head += "# Not here:\n" + "".join(left_out)
    data = "data:\n" + "".join(lines) if lines else "data: {}\n"
    return f"{head}apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: lookonce-{service}\n{data}"


def _reason_to_leave_out(name: str, value: object) -> str:
    if isinstance(value, SecretStr):
        return "a secret; put it into a Secret, and name that in the Deployment"
    if isinstance(value, pathlib.Path) or (name == "adapters" and value):
        return "a file of this machine; the manifests mount the model, and components their certificates and tokens"
    return "an address; the manifests set it" if name in _SET_BY_MANIFESTS else ""
