"""The `lookonce` command: starts the system, sends requests to it, and inspects it. Puts the commands together.

Results go to stdout, everything else to stderr. Exit status: 0; 1 for a failed call, or if the reader of a pipe has
left; 2 for a wrong command line or setting; 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from typing import Never

import typer
from rich.markup import escape

from lookonce.commands import cache, encode, machine, top
from lookonce.commands.asking import chat, generate
from lookonce.commands.bench import command
from lookonce.commands.output import err
from lookonce.commands.running import config, serve, up
from lookonce.errors import ConfigurationError, LookonceError, StartupError
from lookonce.server.setting_names import unknown_variables
from lookonce.server.settings import ServiceSettings

app = typer.Typer(
    help="Lookonce: an image is looked at once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(context_settings=up.EXTRA_ARGUMENTS)(up.up)
serve_app = typer.Typer(help="Run one service in the foreground, with its own flags.", no_args_is_help=True)
serve_app.command("encoder", context_settings=serve.RAW_ARGUMENTS)(serve.serve_encoder)
serve_app.command("decoder", context_settings=serve.RAW_ARGUMENTS)(serve.serve_decoder)
serve_app.command("gateway", context_settings=serve.RAW_ARGUMENTS)(serve.serve_gateway)
app.add_typer(serve_app, name="serve")
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(encode.encode)
app.command()(encode.lookup)
cache_app = typer.Typer(help="See and change what the caches hold, as an operator.", no_args_is_help=True)
for operation in (cache.stats, cache.evict, cache.pin, cache.unpin):
    cache_app.command()(operation)
app.add_typer(cache_app, name="cache")
config_app = typer.Typer(help="See the settings of a service.", no_args_is_help=True)
config_app.command("show", context_settings=config.RAW_ARGUMENTS)(config.show)
app.add_typer(config_app, name="config")
app.command()(top.top)
app.command()(command.bench)
app.command()(machine.models)
app.command()(machine.token)
app.command()(machine.doctor)


def main() -> Never:
    """Entry point of the console script."""
    # Services warn by themselves, and what `token` writes to stderr goes into a file.
    if sys.argv[1:2] not in (["serve"], ["token"]):
        for warning in unknown_variables(os.environ, ServiceSettings.model_fields):
            err.print(f"[bold yellow]warning:[/] {escape(warning)}", soft_wrap=True)
    try:
        app()
    except StartupError as error:
        _fail(error, 2)
    except LookonceError as error:
        _fail(error, 1)
    except OSError as error:
        named = "" if error.filename is None else f"{error.filename}: "
        _fail(ConfigurationError(f"{named}{error.strerror or error}"), 2)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        _flush()
    sys.exit(0)


def _flush() -> None:
    """Writes what is left of the output. If its reader has left, ends the process quietly: Python would complain."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def _fail(error: LookonceError, status: int) -> Never:
    err.print(f"[bold red]error:[/] {escape(error.message)}", soft_wrap=True)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
