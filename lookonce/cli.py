"""The `lookonce` command: starts the system, sends requests to it, and inspects it. Parses flags and prints results.

Results go to stdout, everything else to stderr. Exit status: 0; 1 for a failed call; 2 for a wrong command line.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Never

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lookonce.admin.client import AdminClient
from lookonce.client import Client
from lookonce.errors import (
    ConfigurationError,
    LookonceError,
    StartupError,
    UnavailableError,
)
from lookonce.families.registry import FAMILIES
from lookonce.generation import GenerateOptions, TextPrompt
from lookonce.images import ImageRef
from lookonce.local.cli_options import MAX_UINT32, MAX_UINT64, Images, Target, Timeout, filled, named_image, tenant_name
from lookonce.local.cli_settings import CliSettings, StackRecord, only_stack
from lookonce.local.cli_targets import admin_target, decoder_target, running_stack
from lookonce.local.family_offers import offers_of
from lookonce.local.serve_extra import GATEWAY_MODULES, require_packages, require_serve_packages
from lookonce.local.usage_line import usage_line
from lookonce.sdk.connection.channel import Deadline
from lookonce.server.setting_names import unknown_variables
from lookonce.server.settings import ServiceSettings

if TYPE_CHECKING:
    from lookonce.local.local_stack import LocalStack

_POLL_S = 0.5
_DEMO_MODEL = pathlib.Path(__file__).resolve().parents[1] / "models" / "demo"
_RAW_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_REPORT_WIDTH = 150

app = typer.Typer(
    help="Lookonce: an image is looked at once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
serve_app = typer.Typer(help="Run one service in the foreground, with its own flags.", no_args_is_help=True)
app.add_typer(serve_app, name="serve")

_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)


def main() -> Never:
    """Entry point of the console script."""
    # Services warn by themselves, and what `token` writes to stderr goes into a file.
    if sys.argv[1:2] not in (["serve"], ["token"]):
        for warning in unknown_variables(os.environ, ServiceSettings.model_fields):
            _err.print(f"[bold yellow]warning:[/] {escape(warning)}", soft_wrap=True)
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
    sys.exit(0)


def _fail(error: LookonceError, status: int) -> Never:
    _err.print(f"[bold red]error:[/] {escape(error.message)}", soft_wrap=True)
    raise SystemExit(status)


@app.command()
def up(
    model: Annotated[
        str | None,
        typer.Option(help="Model folder, or a name on the Hugging Face hub. Default: the demo model.", callback=filled),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(help="Redis to use. Default: LOOKONCE_REDIS_URL, else a new server.", callback=filled),
    ] = None,
    decoders: Annotated[int, typer.Option(min=1, help="Number of decoders.")] = 1,
    encoders: Annotated[int, typer.Option(min=1, help="Number of encoders.")] = 1,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the first decoder; 0 is a free one.")] = 0,
    dtype: Annotated[str, typer.Option(help="Element type of the model: auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Start Redis, encoder and decoder on this machine and run them until Ctrl-C."""
    require_serve_packages("lookonce up")
    from lookonce.local.local_stack import LocalStack, RedisSource
    from lookonce.local.model_source import resolve_model, served_name
    from lookonce.model.model_folder import ModelFolder

    settings = CliSettings()
    folder = resolve_model(model or _demo_model())
    # A folder that cannot be served is refused before anything starts.
    ModelFolder.open(folder)
    named = served_name(model or "", folder)
    # SIGTERM stops everything in order, as Ctrl-C does. SIGINT is set, too: a script's background process inherits it
    # ignored, and then Python installs no handler.
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, signal.default_int_handler)
    with contextlib.ExitStack() as exits:
        exits.enter_context(only_stack(settings.record_dir))
        with _err.status("starting") as status:
            stack = LocalStack(
                folder,
                redis=redis_url or (RedisSource.EMBEDDED if settings.redis_url is None else RedisSource.ENVIRONMENT),
                num_encoders=encoders,
                num_decoders=decoders,
                decoder_port=port,
                dtype=dtype,
                encoder_arguments=named,
                decoder_arguments=named,
                on_progress=lambda text: status.update(f"{text} …"),
            )
            exits.enter_context(stack)
        admin_target = stack.encoders[0].ready.admin_target
        record = StackRecord(stack.decoder_targets[0], stack.encoder_targets[0], os.getpid(), admin_target)
        record.write(settings.record_dir)
        exits.callback(record.remove, settings.record_dir)
        _announce(stack, folder)
        _keep(stack)


def _demo_model() -> str:
    if not _DEMO_MODEL.is_dir():
        raise ConfigurationError("give --model: a model folder, or a name on the Hugging Face hub")
    return str(_DEMO_MODEL)


def _announce(stack: LocalStack, folder: pathlib.Path) -> None:
    table = Table.grid(padding=(0, 2))
    for target in stack.decoder_targets:
        table.add_row("decoder", target)
    for target in stack.encoder_targets:
        table.add_row("encoder", target)
    if stack.redis is not None:
        table.add_row("redis", stack.redis.url)
    _out.print(f"[bold]Lookonce is up[/] with {escape(str(folder))}")
    if folder.resolve() == _DEMO_MODEL:
        _out.print("The demo model knows drawn shapes only, not photographs.")
    _out.print(table)
    _out.print('Ask: lookonce generate "What is in the picture?" --image picture.png', markup=False)
    _out.print("Ctrl-C stops it.")


def _keep(stack: LocalStack) -> None:
    """Waits for Ctrl-C. Raises UnavailableError if a process of the stack ends by itself."""
    try:
        while (failed := stack.failed()) is None:
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        _err.print("stopping")
        return
    raise UnavailableError(f"{failed.name} ended with status {failed.returncode}:\n{failed.log_tail()}")


@serve_app.command("encoder", context_settings=_RAW_ARGUMENTS)
def serve_encoder(context: typer.Context) -> None:
    """Run the encoder service (`lookonce serve encoder --help` lists its flags)."""
    _become("encoder_svc", context.args)


@serve_app.command("decoder", context_settings=_RAW_ARGUMENTS)
def serve_decoder(context: typer.Context) -> None:
    """Run the decoder service (`lookonce serve decoder --help` lists its flags)."""
    _become("decoder_svc", context.args)


@serve_app.command("gateway", context_settings=_RAW_ARGUMENTS)
def serve_gateway(context: typer.Context) -> None:
    """Run the gateway with OpenAI's interface (`lookonce serve gateway --help` lists its flags)."""
    require_packages(GATEWAY_MODULES, "lookonce serve gateway", "gateway")
    _run("gateway_svc", context.args)


def _become(module: str, arguments: Sequence[str]) -> Never:
    """Replaces this process by the service, so that signals and the exit status are the service's."""
    require_serve_packages(f"lookonce serve {module.removesuffix('_svc')}")
    from lookonce.local.model_source import with_resolved_model

    _run(module, with_resolved_model(arguments))


def _run(module: str, arguments: Sequence[str]) -> Never:
    # -P keeps the current folder off the import path: it may be a model's folder with Python files.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The question.")],
    image: Annotated[
        list[pathlib.Path] | None,
        typer.Option("--image", "-i", help="Image file; repeatable.", exists=True, dir_okay=False),
    ] = None,
    target: Target = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, max=MAX_UINT32, help="Longest answer, tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy. Default: the model's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=MAX_UINT64, help="Makes sampling repeatable.")] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Send the prompt without the chat template, for models that have none. Write the model's image "
            "placeholder once for each image; without any, the images come before the text.",
        ),
    ] = False,
    timeout_s: Timeout = 120.0,
) -> None:
    """Ask about images. The answer is streamed to stdout."""
    deadline = Deadline.after(timeout_s)
    options: GenerateOptions = {}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if temperature is not None:
        options["temperature"] = temperature
    if seed is not None:
        options["seed"] = seed
    images = image or []
    with _connect(decoder_target(target)) as client:
        asked = _raw(client, prompt, images, _left_s(deadline)) if raw else prompt
        options["timeout_s"] = _left_s(deadline)
        with client.stream(asked, () if raw else images, **options) as stream:
            for text in stream:
                sys.stdout.write(text)
                sys.stdout.flush()
            sys.stdout.write("\n")
            _err.print(f"[dim]{usage_line(stream.usage)}[/]")


def _left_s(deadline: Deadline) -> float:
    """Returns the rest of a deadline, seconds; math.inf without one. Raises DeadlineError if it has passed."""
    left_s = deadline.remaining_s()
    return math.inf if left_s is None else left_s


def _raw(client: Client, text: str, images: Sequence[pathlib.Path], timeout_s: float) -> TextPrompt:
    """Returns a prompt without a chat template. A text without placeholders gets one for each image at its start."""
    placeholder = client.model_info(timeout_s=timeout_s).image_placeholder if images else ""
    return TextPrompt(text if placeholder in text else placeholder * len(images) + text, images)


@app.command()
def encode(images: Images, target: Target = None, timeout_s: Timeout = 120.0) -> None:
    """Encode the images that are not cached yet."""
    with _client(target) as client:
        refs = client.encode(images, timeout_s=timeout_s)
    table = Table("image", "digest", "rows", "source", "model time")
    for path, ref in zip(images, refs, strict=True):
        assert ref.encoding is not None, "encode fills it in"
        time_ms = f"{ref.encoding.compute_time_s * 1000:.0f} ms"
        table.add_row(escape(path.name), ref.hex[:16], str(ref.encoding.num_rows), ref.encoding.source, time_ms)
    _out.print(table)


@app.command()
def lookup(images: Images, target: Target = None, timeout_s: Timeout = 120.0) -> None:
    """Show which images are cached. Uploads nothing."""
    with _client(target) as client:
        refs = [ImageRef.from_file(path) for path in images]
        found = client.lookup(refs, timeout_s=timeout_s)
    table = Table("image", "digest", "cached")
    for path, ref, is_cached in zip(images, refs, found, strict=True):
        table.add_row(escape(path.name), ref.hex[:16], "yes" if is_cached else "no")
    _out.print(table)


@app.command()
def evict(
    images: Annotated[
        list[str] | None, typer.Argument(help="Image files, or SHA-256 digests of 64 hex characters.", metavar="IMAGES")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="host:port of an encoder's operators' calls. "
            "Default: LOOKONCE_ADMIN_TARGET, else the running `lookonce up`.",
            callback=filled,
        ),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(help="Tenant that the images belong to. Default: the default tenant.", callback=tenant_name),
    ] = None,
    all_of_tenant: Annotated[bool, typer.Option("--all-of-tenant", help="Remove all images of the tenant.")] = False,
    timeout_s: Timeout = 60.0,
) -> None:
    """Remove images from all caches: of every model, and as frames of videos. Files are hashed here, not sent.

    Exit status 0 says that the images are forgotten. The token needs the role operator.
    """
    if bool(images) == all_of_tenant:
        raise typer.BadParameter("give images, or --all-of-tenant")
    refs = [named_image(image) for image in images or []]
    with AdminClient.connect(admin_target(target), **CliSettings().connection()) as admin:
        if all_of_tenant:
            _out.print(f"{admin.evict_tenant(tenant or '', timeout_s=timeout_s)} entries removed")
            return
        evicted = admin.evict(refs, tenant=tenant or "", timeout_s=timeout_s)
    table = Table("image", "digest", "found", "entries removed", "video pairs removed")
    for name, one in zip(images or [], evicted, strict=True):
        counts = ("yes" if one.found else "no", str(one.entries), str(one.pairs))
        table.add_row(escape(pathlib.Path(name).name), one.image.hex[:16], *counts)
    _print_report(table)


@app.command()
def models() -> None:
    """List the supported model families. `lookonce doctor --model` checks one model."""
    table = Table(box=None, pad_edge=False)
    for title in ("family", "model type", "architecture", "images"):
        table.add_column(title, overflow="fold")
    for family in FAMILIES.values():
        table.add_row(family.title, family.model_type, family.architecture, ", ".join(offers_of(family)))
    _print_report(table)


@app.command()
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


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub name to check as well.", callback=filled)
    ] = None,
) -> None:
    """Check that this machine has all that Lookonce needs."""
    from lookonce.local.doctor import examine

    findings = examine(CliSettings(), model)
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column()
    table.add_column(overflow="fold")
    for finding in findings:
        mark = "[green]ok[/]" if finding.is_fine else "[bold red]no[/]"
        table.add_row(mark, finding.subject, escape(finding.detail))
    _print_report(table)
    if not all(finding.is_fine for finding in findings):
        raise typer.Exit(1)


def _print_report(table: Table) -> None:
    """Prints a table. In files and pipes, which have no width, long fingerprints and names stay on one line."""
    out = _out if _out.is_terminal else Console(highlight=False, width=max(_out.width, _REPORT_WIDTH))
    out.print(table)


def _client(target: str | None) -> Client:
    """Returns a client of the decoder, and of its encoder as well if the decoder is the running stack's."""
    decoder, record = decoder_target(target), running_stack()
    is_running_stack = record is not None and record.decoder_target == decoder
    return _connect(decoder, record.encoder_target if record is not None and is_running_stack else None)


def _connect(decoder: str, encoder: str | None = None) -> Client:
    return Client.connect(decoder, encoder, **CliSettings().connection())


if __name__ == "__main__":
    main()
