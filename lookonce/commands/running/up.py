"""`lookonce up`: runs the whole system on this machine until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import time
import webbrowser
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.markup import escape

from lookonce.commands.options import filled
from lookonce.commands.output import err, harmless, out, say
from lookonce.commands.running.interrupts import stop_in_order
from lookonce.commands.running.service_flags import service_flags
from lookonce.commands.running.services import Service
from lookonce.errors import ConfigurationError
from lookonce.local.cli_settings import CliSettings
from lookonce.local.serve_extra import GATEWAY_MODULES, require_packages, require_serve_packages
from lookonce.local.stack_record import StackRecord
from lookonce.server.settings import ServiceSettings

if TYPE_CHECKING:
    from lookonce.local.local_stack import LocalStack

# Context settings of `up`, which hands the flags behind -- on.
EXTRA_ARGUMENTS = {"allow_extra_args": True}
_POLL_S = 0.5
# Variables of a session with windows, on systems where there may be none.
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
_DEMO_MODEL = pathlib.Path(__file__).resolve().parents[3] / "models" / "demo"


def _element_type(value: str) -> str:
    """Refuses a type that no service has, before a model is downloaded."""
    choices = get_args(ServiceSettings.model_fields["dtype"].annotation)
    if value not in choices:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}")
    return value


def up(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help="Model folder, or a name on the Hugging Face hub. Default: the demo model.", callback=filled),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(help="Redis to use. Default: LOOKONCE_REDIS_URL, else a new server.", callback=filled),
    ] = None,
    decoders: Annotated[int, typer.Option(min=1, max=64, help="Number of decoders.")] = 1,
    encoders: Annotated[int, typer.Option(min=1, max=64, help="Number of encoders.")] = 1,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the first decoder; 0 is a free one.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="Element type of the model: auto, float32, bfloat16 or float16.", callback=_element_type)
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="Device of the model: auto, cpu, cuda, or one of a plug-in.", callback=filled)
    ] = "auto",
    playground: Annotated[
        bool, typer.Option("--playground", help="Also run the gateway with its playground, and open it in a browser.")
    ] = False,
) -> None:
    """Start Redis, encoder and decoder on this machine and run them until Ctrl-C.

    A process that ends by itself is started again at its old address. Flags of the services follow after --, such as
    `lookonce up -- --max-num-seqs 8`; each goes to every service that has it.
    """
    require_serve_packages("lookonce up")
    if playground:
        require_packages(GATEWAY_MODULES, "lookonce up --playground", "gateway")
    from lookonce.commands.running.found_encoders import wait_until_encoders_are_found
    from lookonce.devices.registry import check_device
    from lookonce.local.local_stack import LocalStack, RedisSource
    from lookonce.local.model_source import resolve_model, served_name
    from lookonce.model.model_folder import ModelFolder

    # A device that is not installed is refused before a model is downloaded, and a folder that cannot be served before
    # anything starts.
    check_device(device)
    settings = CliSettings()
    folder = resolve_model(model or _demo_model())
    ModelFolder.open(folder)
    named = served_name(model or "", folder)
    flags = service_flags(context.args, str(folder))
    stop_in_order()
    with contextlib.ExitStack() as exits:
        with err.status("starting") as status:
            stack = LocalStack(
                folder,
                redis=redis_url or (RedisSource.EMBEDDED if settings.redis_url is None else RedisSource.ENVIRONMENT),
                num_encoders=encoders,
                num_decoders=decoders,
                decoder_port=port,
                dtype=dtype,
                device=device,
                encoder_arguments=[*named, *flags[Service.ENCODER]],
                decoder_arguments=[*named, *flags[Service.DECODER]],
                has_playground=playground,
                on_progress=lambda text: status.update(f"{text} …"),
            )
            exits.enter_context(stack)
            wait_until_encoders_are_found(stack.decoder_targets)
        record = _record_of(stack)
        record.write(settings.record_dir)
        exits.callback(record.remove, settings.record_dir)
        _announce(stack, folder)
        _open_playground(stack)
        _keep(stack)


def _record_of(stack: LocalStack) -> StackRecord:
    admins = {
        name: tuple(str(process.ready.admin_target) for process in processes)
        for name, processes in (("encoders", stack.encoders), ("decoders", stack.decoders))
    }
    metrics = {
        name: tuple(f"127.0.0.1:{process.ready.metrics_port}" for process in processes)
        for name, processes in (("decoder_metrics", stack.decoders), ("encoder_metrics", stack.encoders))
    }
    return StackRecord(
        os.getpid(),
        tuple(stack.decoder_targets),
        tuple(stack.encoder_targets),
        admins["encoders"][0],
        **metrics,
        decoder_admins=admins["decoders"],
    )


def _demo_model() -> str:
    if not _DEMO_MODEL.is_dir():
        raise ConfigurationError("give --model: a model folder, or a name on the Hugging Face hub")
    return str(_DEMO_MODEL)


def _announce(stack: LocalStack, folder: pathlib.Path) -> None:
    addresses = [("decoder", target) for target in stack.decoder_targets]
    addresses += [("encoder", target) for target in stack.encoder_targets]
    if stack.redis is not None:
        addresses.append(("redis", stack.redis.url))
    out.print(f"[bold]Lookonce is up[/] with {escape(harmless(folder))}")
    if folder.resolve() == _DEMO_MODEL:
        out.print("The demo model knows drawn shapes only, not photographs.")
    for service, address in addresses:
        out.print(f"{service:<7}  {address}", markup=False, soft_wrap=True)
    for gateway in stack.gateways:
        out.print(f"gateway  http://{gateway.ready.target}/", markup=False, soft_wrap=True)
    out.print('Ask: lookonce generate "What is in the picture?" --image picture.png', markup=False)
    out.print("Ctrl-C stops it.")


def _open_playground(stack: LocalStack) -> None:
    """Opens the playground in a browser, if there is a playground and the command runs in a terminal with windows."""
    has_windows = sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in _DISPLAYS)
    if stack.gateways and has_windows and out.is_terminal:
        webbrowser.open(f"http://{stack.gateways[0].ready.target}/")


def _keep(stack: LocalStack) -> None:
    """Keeps the processes running until Ctrl-C. Raises UnavailableError if one ends too often."""
    from lookonce.local.supervisor import Supervisor

    supervisor = Supervisor(stack, say)
    try:
        while True:
            supervisor.look()
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        err.print("stopping")
