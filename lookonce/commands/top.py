"""`lookonce top`: shows the load of all replicas, again and again, as htop shows processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, NamedTuple

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from lookonce.commands.options import AsJson, filled
from lookonce.commands.output import harmless, out, print_json, print_line
from lookonce.commands.replicas import Kind, Replica, Value, look_at
from lookonce.commands.targets import connect, decoder_target, stacks
from lookonce.local.cli_settings import CliSettings
from lookonce.local.stack_record import only_stack

_MIB = 1 << 20


class _Column(NamedTuple):
    """One column: its title for people, its name for programs, its value, and the text of a value."""

    title: str
    name: str
    value: Callable[[Replica], Value]
    text: Callable[[float], str]


def _gauge(title: str, name: str, text: Callable[[float], str] = "{:.0f}".format) -> _Column:
    return _Column(title, name, lambda replica: replica.value(name), text)


def _rate(title: str, name: str) -> _Column:
    return _Column(title, f"{name}_per_s", lambda replica: replica.rate(name), "{:.1f}".format)


def _share(title: str, name: str, part: str, whole: str) -> _Column:
    return _Column(title, name, lambda replica: replica.share(part, whole), "{:.0%}".format)


_COLUMNS: Mapping[Kind, Sequence[_Column]] = {
    "decoder": (
        _gauge("running", "running"),
        _gauge("waiting", "waiting"),
        _gauge("for rows", "waiting_for_rows"),
        _gauge("KV", "kv_cache", "{:.0%}".format),
        _gauge("device rows", "device_rows"),
        _rate("tokens/s", "generated_tokens"),
        _rate("prompt tokens/s", "prompt_tokens"),
        _share("prefix hits", "prefix_hit_ratio", "prefix_hits", "prefix_queries"),
        _share("rows reused", "rows_reused_ratio", "reused_rows", "rows"),
    ),
    "encoder": (
        _gauge("queued", "queued_images"),
        _rate("encodes/s", "encodes"),
        _rate("look-ups/s", "lookups"),
        _share("cache hits", "hit_ratio", "hits", "lookups"),
        _gauge("entries", "cache_entries"),
        _gauge("MiB", "cache_bytes", lambda value: f"{value / _MIB:.1f}"),
    ),
}


def top(
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="host:port of a decoder, which is asked for its load; repeatable. Default: LOOKONCE_TARGET, else all "
            "replicas of the running `lookonce up`."
        ),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            help="host:port of a decoder's or an encoder's Prometheus endpoint (metrics_listen), which also has rates "
            "and hit ratios; repeatable."
        ),
    ] = None,
    interval_s: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Time between two looks, seconds.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one report, after one interval.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the load of all replicas until Ctrl-C: requests, KV cache, hit ratios, tokens per second.

    Ratios count since the start of a process, rates since the last look. In a pipe, each look is lines with tabs; with
    --json, it is one array. With --once, exit status 1 says that no replica answered.
    """
    for name in [*(target or []), *(metrics or [])]:
        filled(name)
    with contextlib.ExitStack() as exits:
        replicas = _replicas(target or [], metrics or [], exits)
        look_at(replicas)
        if as_json or once or not out.is_terminal or out.is_dumb_terminal:
            _print_looks(replicas, interval_s, once, as_json)
            return
        with Live(_view(replicas), console=out, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                look_at(replicas)
                live.update(_view(replicas), refresh=True)


def _replicas(targets: Sequence[str], metrics: Sequence[str], exits: contextlib.ExitStack) -> list[Replica]:
    """Returns the replicas that were named, else those of the environment, else those of the running stack."""
    if not targets and not metrics:
        named = CliSettings().target
        record = None if named is not None else only_stack(stacks())
        if record is not None:
            decoders = zip(record.decoder_metrics, record.decoders, strict=True)
            encoders = zip(record.encoder_metrics, record.encoders, strict=True)
            return [
                *(Replica.of_metrics(address, name, "decoder") for address, name in decoders),
                *(Replica.of_metrics(address, name, "encoder") for address, name in encoders),
            ]
        targets = [decoder_target(named)]
    loads = [Replica.of_load(address, exits.enter_context(connect(address))) for address in targets]
    return [*loads, *(Replica.of_metrics(address) for address in metrics)]


def _print_looks(replicas: Sequence[Replica], interval_s: float, once: bool, as_json: bool) -> None:
    titled: set[Kind] = set()
    while True:
        time.sleep(interval_s)
        look_at(replicas)
        if as_json:
            print_json([_object(replica) for replica in replicas])
        for replica in [] if as_json else replicas:
            if replica.kind not in titled:
                print_line(("kind", *_titles(replica.kind)))
                titled.add(replica.kind)
            print_line((replica.kind, *_cells(replica)))
        out.file.flush()
        if once:
            if all(replica.fault for replica in replicas):
                raise typer.Exit(1)
            return


def _view(replicas: Sequence[Replica]) -> Group:
    tables = []
    for kind in _COLUMNS:
        table = Table(title=f"{kind}s", title_justify="left", expand=False)
        for number, title in enumerate(_titles(kind)):
            table.add_column(title, justify="left" if number < 2 else "right", no_wrap=number < 1)
        rows = [_cells(replica) for replica in replicas if replica.kind == kind]
        for row in rows:
            table.add_row(*(escape(harmless(cell)) for cell in row))
        if rows:
            tables.append(table)
    return Group(*tables, f"{time.strftime('%H:%M:%S')}   Ctrl-C ends")


def _titles(kind: Kind) -> list[str]:
    return ["replica", "state", *(column.title for column in _COLUMNS[kind])]


def _cells(replica: Replica) -> list[str]:
    values = [(column, column.value(replica)) for column in _COLUMNS[replica.kind]]
    texts = ["-" if value is None else column.text(value) for column, value in values]
    return [replica.name, replica.fault or "up", *texts]


def _object(replica: Replica) -> dict[str, object]:
    values = {column.name: column.value(replica) for column in _COLUMNS[replica.kind]}
    return {"kind": replica.kind, "replica": replica.name, "state": replica.fault or "up", **values}
