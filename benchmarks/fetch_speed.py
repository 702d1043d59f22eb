"""How fast do rows come from Redis into a buffer, against a bare socket and redis-py? `--help` lists the options.

All sides read the same bytes from one server over the same kind of socket, in turns: a raw `recv_into` of a loopback
sender, our `read_rows` (verified), and redis-py's `get`. Then small GETs are timed beside large reads.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import pathlib
import random
import resource
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import redis

from benchmarks import report
from lookonce.content_key import (
    DEFAULT_TENANT,
    ContentKey,
    EncoderFingerprint,
    ProcessorOptions,
    content_key,
    image_digest,
)
from lookonce.embedding_meta import EmbeddingMeta, RowDtype
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.store.cache_names import data_key
from lookonce.store.embedding_store import EmbeddingStore, WriteOutcome
from lookonce.store.redis.node import RedisNode
from lookonce.store.sealing import AesGcm, Checksum

_NAME = "fetch_speed"
_MB = 1_000_000
_BUDGET_S = 30.0
_HIDDEN_SIZE = 3584
_SMALL_BYTES = 1024
_SMALL_GETS = 10_000
_SMALL_ROUNDS = 5
_COMPUTE = "while True: pass"

# The sender behind the bare socket: it answers each byte with the payload, from its own process like a server.
_SENDER = """
import os, socket, sys
family, size = getattr(socket, sys.argv[1]), int(sys.argv[2])
# Zeros would all lie in one page, and the sender would read nothing but its cache.
payload = os.urandom(size)
with socket.socket(family) as server:
    if family == socket.AF_INET:
        server.bind(("127.0.0.1", 0))
    else:
        server.bind(sys.argv[3])
    server.listen()
    print(server.getsockname()[1] if family == socket.AF_INET else 0, flush=True)
    connection, _ = server.accept()
    with connection:
        while connection.recv(1):
            connection.sendall(payload)
"""


@dataclass(frozen=True, slots=True)
class Speed:
    """One way of reading one size, median over the rounds."""

    gb_per_s: float
    # User and system time of this process, seconds per gigabyte.
    cpu_s_per_gb: float


@dataclass(frozen=True, slots=True)
class Size:
    """All ways of reading one entry."""

    num_bytes: int
    raw: list[Speed]
    # A whole image by one command, as decoders read it from Valkey 9 or later, over TCP up to 4 MiB.
    ours: list[Speed]
    # The same in pieces, as decoders read row ranges, and whole images from other servers.
    in_pieces: list[Speed]
    sealed: list[Speed]
    redis_py: list[Speed]
    # The fastest possible GET of the entry, which checks its length only.
    bare_get: list[Speed]


def main(given: Sequence[str] | None = None) -> None:
    """Measures every size, writes JSON and the section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="per size and side (default: %(default)s)")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.5, 2, 8, 24, 64, 117])
    report.add_quick(parser)
    arguments = parser.parse_args(given)
    num_small_rounds, num_gets = _SMALL_ROUNDS, _SMALL_GETS
    if arguments.quick:
        arguments.rounds, arguments.megabytes, num_small_rounds, num_gets = 1, [0.5, 2], 1, 100
    sizes = {}
    for name, use_tcp in (("TCP loopback", True), ("Unix socket", False)):
        with EmbeddedRedis(2 << 30, use_tcp=use_tcp) as server:
            megabytes = arguments.megabytes
            sizes[name] = [measure(server, int(size * _MB), arguments.rounds, use_tcp=use_tcp) for size in megabytes]
            if use_tcp:
                small = [small_reads(server, num_gets) for _ in range(num_small_rounds)]
    figures = {
        "sizes": {name: [asdict(size) for size in found] for name, found in sizes.items()},
        "small_get_us": [{beside: _percentiles(found) for beside, found in one.items()} for one in small],
    }
    report.publish(_NAME, figures, _section(sizes, small), is_quick=arguments.quick)


def measure(server: EmbeddedRedis, num_bytes: int, num_rounds: int, *, use_tcp: bool) -> Size:
    """Runs interleaved reads of one entry of about this size."""
    meta = EmbeddingMeta(max(1, num_bytes // (2 * _HIDDEN_SIZE)), _HIDDEN_SIZE, 0, RowDtype.BFLOAT16, 100, 100)
    rows = memoryview(secrets.token_bytes(meta.size_bytes))
    out = memoryview(bytearray(meta.size_bytes))
    with contextlib.ExitStack() as exits:
        plain, sealed = (
            EmbeddingStore(server.url, _BUDGET_S, 600, 512 << 20, sealer=sealer)
            for sealer in (Checksum(), AesGcm([bytes(32)]))
        )
        for store in (plain, sealed):
            exits.callback(store.close)
        keys = _key(f"plain {num_bytes}"), _key(f"sealed {num_bytes}")
        _write(plain, keys[0], meta, rows)
        _write(sealed, keys[1], meta, rows)
        raw = exits.enter_context(_raw_reader(out, use_tcp=use_tcp))
        client = exits.enter_context(redis.Redis.from_url(server.url))
        name = data_key(keys[0])

        def ours() -> None:
            assert plain.read_rows(keys[0], 0, meta.num_rows, out, num_rows=meta.num_rows) is None

        def in_pieces() -> None:
            assert plain.read_rows(keys[0], 0, meta.num_rows, out) is None

        def ours_sealed() -> None:
            assert sealed.read_rows(keys[1], 0, meta.num_rows, out, num_rows=meta.num_rows) is None

        def redis_py() -> None:
            assert client.get(name) is not None

        bare_get = exits.enter_context(_bare_getter(server.url, client.strlen(name), name))
        sides: list[Callable[[], None]] = [raw, ours, in_pieces, ours_sealed, redis_py, bare_get]
        speeds: list[list[Speed]] = [[] for _ in sides]
        repeats = max(1, 50 * _MB // meta.size_bytes)
        for side in sides:
            side()
        for number in range(num_rounds):
            for index in [(number + turn) % len(sides) for turn in range(len(sides))]:
                speeds[index].append(_timed(sides[index], repeats, meta.size_bytes))
        for key in keys:
            client.delete(data_key(key))
    size = Size(meta.size_bytes, *speeds)
    print(f"{meta.size_bytes / _MB:.1f} MB: {_ratio(size.ours, size.raw):.2f} of the bare socket", flush=True)
    return size


def _write(store: EmbeddingStore, key: ContentKey, meta: EmbeddingMeta, rows: memoryview) -> None:
    outcome = store.try_write(key, meta, rows)
    assert outcome in (WriteOutcome.STORED, WriteOutcome.EXISTS), outcome


def small_reads(server: EmbeddedRedis, num_gets: int = _SMALL_GETS) -> dict[str, list[float]]:
    """Returns the µs of 1 KB GETs: alone, beside two readers of 24 MB entries, and beside two busy processes."""
    meta = EmbeddingMeta(24 * _MB // (2 * _HIDDEN_SIZE), _HIDDEN_SIZE, 0, RowDtype.BFLOAT16, 100, 100)
    with contextlib.closing(EmbeddingStore(server.url, _BUDGET_S, 600, 512 << 20)) as store:
        _write(store, _key("beside"), meta, memoryview(secrets.token_bytes(meta.size_bytes)))
    context = multiprocessing.get_context("spawn")
    begun, ended = context.Event(), context.Event()
    reader = context.Process(target=_read_on, args=(server.url, meta, begun, ended), daemon=True)
    with redis.Redis.from_url(server.url) as client:
        client.set("small", random.Random(1).randbytes(_SMALL_BYTES))
        alone = _latencies_us(client, num_gets)
        reader.start()
        begun.wait()
        beside = _latencies_us(client, num_gets)
        ended.set()
        reader.join()
        with contextlib.ExitStack() as exits:
            for _ in range(2):
                process = exits.enter_context(subprocess.Popen([sys.executable, "-c", _COMPUTE]))
                exits.callback(process.kill)
            computing = _latencies_us(client, num_gets)
    return {"alone": alone, "readers": beside, "computing": computing}


def _read_on(url: str, meta: EmbeddingMeta, begun: Any, ended: Any) -> None:
    """Reads a large entry in two threads until `ended` is set."""
    store = EmbeddingStore(url, _BUDGET_S, 600, 512 << 20)

    def read() -> None:
        out = memoryview(bytearray(meta.size_bytes))
        while not ended.is_set():
            assert store.read_rows(_key("beside"), 0, meta.num_rows, out, num_rows=meta.num_rows) is None
            begun.set()

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()


def _latencies_us(client: Any, num_gets: int) -> list[float]:
    found = []
    for _ in range(num_gets):
        started = time.perf_counter()
        client.get("small")
        found.append(1e6 * (time.perf_counter() - started))
    return sorted(found)


@contextlib.contextmanager
def _raw_reader(out: memoryview, *, use_tcp: bool) -> Iterator[Callable[[], None]]:
    family = socket.AF_INET if use_tcp else socket.AF_UNIX
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "s")
        command = [sys.executable, "-c", _SENDER, family.name, str(out.nbytes), path]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as sender, socket.socket(family) as connection:
            assert sender.stdout is not None
            port = int(sender.stdout.readline())
            connection.connect(("127.0.0.1", port) if use_tcp else path)

            def read() -> None:
                connection.sendall(b"x")
                num_bytes = 0
                while num_bytes < out.nbytes:
                    num_bytes += connection.recv_into(out[num_bytes:])

            yield read
            connection.close()


@contextlib.contextmanager
def _bare_getter(url: str, num_bytes: int, name: bytes) -> Iterator[Callable[[], None]]:
    """Yields a reader at the server's own speed: one command, and a receive of exactly its reply's bytes."""
    command = b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name)
    reply = memoryview(bytearray(len(b"$%d\r\n" % num_bytes) + num_bytes + 2))
    node = RedisNode(url, None, _BUDGET_S)
    try:
        with node.exchange(time.monotonic() + _BUDGET_S) as exchange:

            def read() -> None:
                exchange.socket.sendall(command)
                num_received = 0
                while num_received < reply.nbytes:
                    num_received += exchange.socket.recv_into(reply[num_received:])

            yield read
    finally:
        node.retire()


def _timed(read: Callable[[], None], repeats: int, num_bytes: int) -> Speed:
    cpu_s, started_s = _cpu_s(), time.perf_counter()
    for _ in range(repeats):
        read()
    gigabytes = repeats * num_bytes / 1e9
    return Speed(gigabytes / (time.perf_counter() - started_s), (_cpu_s() - cpu_s) / gigabytes)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _key(name: str) -> ContentKey:
    digest = image_digest(name.encode())
    return content_key(digest, EncoderFingerprint("benchmark"), ProcessorOptions(), DEFAULT_TENANT)


def _ratio(side: Sequence[Speed], other: Sequence[Speed]) -> float:
    """Returns the median over the rounds of one side's speed over the other's."""
    return statistics.median(one.gb_per_s / two.gb_per_s for one, two in zip(side, other, strict=True))


def _section(sizes: Mapping[str, Sequence[Size]], small: Sequence[Mapping[str, Sequence[float]]]) -> str:
    question = (
        "## fetch_speed\n\nHow fast do rows come from Redis into a buffer? Goals: at least 0.8 of a bare socket's "
        "speed\nand at most a third of redis-py's CPU time for 2 to 117 MB; p99.9 of small GETs beside 24 MB reads at "
        "most 5 ms."
    )
    num_rounds = len(next(iter(sizes.values()))[0].ours)
    note = (
        f"{num_rounds} interleaved rounds; rows are verified, redis-py only receives. Rows: as decoders read an image\n"
        "of which they have nothing, from a Valkey since 9 by one command, over TCP up to 4 MiB; in pieces: as ranges\n"
        "are read, and all "
        "from other servers. Bare GET: what the server makes possible, a receive of the reply's bytes by one command "
        f"that\nnobody looks at. A GET of 1 KB over TCP, median / p99 / p99.9 (least … most of the last), "
        f"{len(small)} × {len(small[0]['alone'])}:\nalone {_quantiles([one['alone'] for one in small])},\n"
        f"beside a process with two threads that read 24 MB entries {_quantiles([one['readers'] for one in small])},\n"
        "and, as what this machine's two cores do to it by themselves, beside two processes that only compute "
        f"{_quantiles([one['computing'] for one in small])}."
    )
    tables = [f"{name}:\n\n{_table(found)}" for name, found in sizes.items()]
    return "\n\n".join([question, *tables, note])


def _table(sizes: Sequence[Size]) -> str:
    head = [
        "entry", "bare socket", "rows", "rows ÷ socket", "least … most", "in pieces ÷ socket", "redis-py ÷ socket",
        "AES-GCM ÷ socket", "bare GET ÷ socket", "CPU of rows ÷ redis-py",
    ]  # fmt: skip
    rows = []
    for size in sizes:
        ratios = [one.gb_per_s / raw.gb_per_s for one, raw in zip(size.ours, size.raw, strict=True)]
        cpu = statistics.median(
            one.cpu_s_per_gb / two.cpu_s_per_gb for one, two in zip(size.ours, size.redis_py, strict=True)
        )
        rows.append(
            [
                f"{size.num_bytes / _MB:.1f} MB",
                f"{statistics.median(one.gb_per_s for one in size.raw):.2f} GB/s",
                f"{statistics.median(one.gb_per_s for one in size.ours):.2f} GB/s",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f} … {max(ratios):.2f}",
                f"{_ratio(size.in_pieces, size.raw):.2f}",
                f"{_ratio(size.redis_py, size.raw):.2f}",
                f"{_ratio(size.sealed, size.raw):.2f}",
                f"{_ratio(size.bare_get, size.raw):.2f}",
                f"{cpu:.2f}",
            ]
        )
    return report.table(head, rows)


def _percentiles(sorted_us: Sequence[float]) -> dict[str, float]:
    """Returns the percentiles that describe the spread of some figures."""
    return {f"p{100 * share:g}": _quantile(sorted_us, share) for share in (0.5, 0.9, 0.99, 0.999, 1.0)}


def _quantile(sorted_values: Sequence[float], share: float) -> float:
    return sorted_values[min(len(sorted_values) - 1, int(share * len(sorted_values)))]


def _quantiles(rounds: Sequence[Sequence[float]]) -> str:
    """Medians over the rounds, each of which is sorted."""
    picked = [[_quantile(one, share) / 1000 for one in rounds] for share in (0.5, 0.99, 0.999)]
    medians = " / ".join(f"{statistics.median(values):.2f}" for values in picked)
    return f"{medians} ms ({min(picked[-1]):.2f} … {max(picked[-1]):.2f})"


if __name__ == "__main__":
    main()
