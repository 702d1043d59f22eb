"""`lookonce models`, `token` and `doctor`: what this installation has, without any server."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.text import Text

from lookonce.commands.options import filled
from lookonce.commands.output import err, print_rows
from lookonce.families.registry import FAMILIES
from lookonce.local.cli_settings import CliSettings
from lookonce.local.family_offers import offers_of
from lookonce.local.finding import Finding
from lookonce.local.serve_extra import require_serve_packages


def models() -> None:
    """List the supported model families. `lookonce doctor --model` checks one model."""
    rows = [(one.title, one.model_type, one.architecture, ", ".join(offers_of(one))) for one in FAMILIES.values()]
    print_rows(("family", "model type", "architecture", "images"), rows, is_boxed=False)


def token(
    name: Annotated[str, typer.Argument(help="Name of the token's holder, shown in audit lines.")],
    tenant: Annotated[str, typer.Option(help="Tenant of the holder. Default: the default tenant.")] = "",
    role: Annotated[str, typer.Option(help="client, service (decoders that call encoders) or operator.")] = "client",
) -> None:
    """Make a bearer token. Prints the token to stdout and its entry for auth_tokens_file to stderr."""
    require_serve_packages("lookonce token")
    from lookonce.local.token_entry import new_token

    made, entry = new_token(name, tenant, role)
    sys.stdout.write(made + "\n")
    sys.stderr.write(entry)


def doctor(
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub name to check as well.", callback=filled)
    ] = None,
    start: Annotated[
        bool,
        typer.Option(
            "--start",
            help="Also start the services with the model, ask a question about a picture, and end them. It takes as "
            "much time and memory as `lookonce up`.",
        ),
    ] = False,
) -> None:
    """Check that this machine has all that Lookonce needs."""
    if start and model is None:
        raise typer.BadParameter("needs --model", param_hint="--start")
    from lookonce.local.doctor import examine

    findings = examine(CliSettings(), model)
    # Without a template a decoder starts, and answers prompts that need none.
    if start and model is not None and all(one.is_fine or one.subject == "chat template" for one in findings):
        from lookonce.commands.running.interrupts import stop_in_order
        from lookonce.commands.running.trial_start import examine_start
        from lookonce.local.model_source import resolve_model

        stop_in_order()
        with err.status("starting encoder and decoder …"):
            findings += examine_start(resolve_model(model))
    elif start:
        findings.append(Finding("start", False, "not tried, because of the faults above"))
    marks = {True: Text("ok", "green"), False: Text("no", "bold red")}
    print_rows((), [(marks[one.is_fine], one.subject, one.detail) for one in findings], is_boxed=False)
    if not all(finding.is_fine for finding in findings):
        raise typer.Exit(1)
