"""Hands the flags behind `--` of `lookonce up` to the services: each flag goes to every service that has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer

from lookonce.commands.running.services import Service, settings_class
from lookonce.server.setting_names import unknown_flags
from lookonce.server.settings_parser import parse_settings

_TAKERS = (Service.ENCODER, Service.DECODER)
# Chosen by `up`, for all processes or for each its own: two processes cannot have one address.
_CHOSEN_BY_UP = frozenset({
    "--model", "--dtype", "--device", "--redis-url", "--listen", "--admin-listen", "--health-listen",
    "--metrics-listen", "--ready-file", "--encoder-target", "--drain-timeout-s",
})  # fmt: skip
# The addresses in the environment do not count, since `up` gives its own.
_ADDRESSES = tuple(
    part for name in ("--listen", "--metrics-listen", "--admin-listen") for part in (name, "127.0.0.1:0")
)


def service_flags(arguments: Sequence[str], model: str) -> dict[Service, list[str]]:
    """Returns the flags of encoders and of decoders.

    Raises BadParameter for a flag that none of them has, and for one that `up` sets itself; ConfigurationError for a
    value that a service would refuse, before anything starts.
    """
    flags = {service: _flags_of(service) for service in _TAKERS}
    fault = unknown_flags(
        [_name(one) for one in arguments if one.startswith("--")], {*flags[Service.ENCODER], *flags[Service.DECODER]}
    )
    if fault is not None:
        raise typer.BadParameter(f"{fault}; `lookonce serve encoder --help` and `… decoder --help` list them")
    chosen = _chosen(_groups(arguments), flags)
    for service, own in chosen.items():
        parse_settings(settings_class(service), ["--model", model, *_ADDRESSES, *own], f"{service}_svc")
    return chosen


def _flags_of(service: Service) -> set[str]:
    names = {name.replace("_", "-") for name in settings_class(service).model_fields}
    return {f"--{name}" for name in names} | {f"--no-{name}" for name in names}


def _groups(arguments: Sequence[str]) -> list[list[str]]:
    """Returns each flag with the values behind it. Raises BadParameter for a value without a flag."""
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("--"):
            groups.append([argument])
        elif groups:
            groups[-1].append(argument)
        else:
            raise typer.BadParameter(f"{argument!r} is no flag; flags of the services follow after --")
    return groups


def _chosen(groups: Sequence[Sequence[str]], flags: Mapping[Service, set[str]]) -> dict[Service, list[str]]:
    chosen: dict[Service, list[str]] = {service: [] for service in flags}
    for group in groups:
        name = _name(group[0])
        if name in _CHOSEN_BY_UP:
            raise typer.BadParameter(f"`up` chooses {name} itself; its own flags are in `lookonce up --help`")
        for service, known in flags.items():
            if name in known:
                chosen[service] += group
    return chosen


def _name(argument: str) -> str:
    return argument.partition("=")[0]
