"""The `lookonce` command: starts the system, sends requests to it, and inspects it. Puts the commands together.

Results go to stdout, everything else to stderr. Exit status: 0; 1 for a failed call, or if stdout takes no more; 2 for
a wrong command line, setting or file; 130 after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Never

import typer
from rich.markup import escape

from lookonce.commands import adapters, cache, encode, machine, top
from lookonce.commands.asking import chat, generate
from lookonce.commands.asking.sampling import with_flag
from lookonce.commands.bench import command
from lookonce.commands.output import complain, err, harmless
from lookonce.commands.running import config, serve, up
from lookonce.errors import InvalidParameterError, LookonceError, StartupError
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
serve_app.command("rank", context_settings=serve.RAW_ARGUMENTS)(serve.serve_rank)
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
adapters_app = typer.Typer(help="List a decoder's LoRA adapters, and load and unload them.", no_args_is_help=True)
adapters_app.command("list")(adapters.names)
adapters_app.command()(adapters.load)
adapters_app.command()(adapters.unload)
app.add_typer(adapters_app, name="adapters")
config_app = typer.Typer(help="See the settings of a service.", no_args_is_help=True)
config_app.command("show", context_settings=config.RAW_ARGUMENTS)(config.show)
app.add_typer(config_app, name="config")
app.command()(top.top)
app.command()(command.bench)
app.command()(machine.models)
app.command()(machine.token)
app.command()(machine.doctor)


def run() -> Never:
    """Runs the command of this process' arguments and ends the process."""
    # Services warn by themselves, and what `token` writes to stderr goes into a file.
    if sys.argv[1:2] not in (["serve"], ["token"]):
        for warning in unknown_variables(os.environ, ServiceSettings.model_fields):
            err.print(f"[bold yellow]warning:[/] {escape(harmless(warning))}", soft_wrap=True)
    try:
        app()
    except LookonceError as error:
        complain(with_flag(error))
        raise SystemExit(_status_of(error)) from None
    except OSError as error:
        complain(f"{error.filename or 'stdout'}: {error.strerror or error}")
        if error.filename is not None:
            raise SystemExit(2) from None
        _discard_output()
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        _flush()
    sys.exit(0)


def _status_of(error: LookonceError) -> int:
    """Returns the exit status of an error: 2 if it was found before any call, 1 otherwise."""
    is_own = isinstance(error, InvalidParameterError) and error.request_id is None
    return 2 if is_own or isinstance(error, StartupError) else 1


def _flush() -> None:
    """Writes what is left of the output. If stdout takes no more, ends the process without Python's complaint."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # The reader of a pipe that has left needs no message.
        if not isinstance(error, BrokenPipeError):
            complain(f"stdout: {error.strerror or error}")
        _discard_output()
        raise SystemExit(1) from None


def _discard_output() -> None:
    """Sends what stdout still holds to the null device, since Python writes it when it ends."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
