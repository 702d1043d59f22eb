"""`lookonce serve`: becomes the process of one service, with its own flags."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Never

import typer

from lookonce.local.serve_extra import GATEWAY_MODULES, require_packages, require_serve_packages

# Context settings of a command that hands all its flags on.
RAW_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def serve_encoder(context: typer.Context) -> None:
    """Run the encoder service (`lookonce serve encoder --help` lists its flags)."""
    _become("encoder_svc", "encoder", context.args)


def serve_decoder(context: typer.Context) -> None:
    """Run the decoder service (`lookonce serve decoder --help` lists its flags)."""
    _become("decoder_svc", "decoder", context.args)


def serve_rank(context: typer.Context) -> None:
    """Run a rank of a split model on a machine of its own (`lookonce serve rank --help` lists its flags)."""
    _become("decoder_svc.remote_rank", "rank", context.args)


def serve_gateway(context: typer.Context) -> None:
    """Run the gateway with OpenAI's interface (`lookonce serve gateway --help` lists its flags)."""
    require_packages(GATEWAY_MODULES, "lookonce serve gateway", "gateway")
    _run("gateway_svc", context.args)


def _become(module: str, command: str, arguments: Sequence[str]) -> Never:
    """Replaces this process by the service, so that signals and the exit status are the service's."""
    require_serve_packages(f"lookonce serve {command}")
    from lookonce.local.model_source import with_resolved_model

    _run(module, with_resolved_model(arguments))


def _run(module: str, arguments: Sequence[str]) -> Never:
    # -P keeps the current folder off the import path: it may be a model's folder with Python files.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])
