"""Settings that hold for every test, cache servers, this process' log, and one running system for end-to-end tests."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import logging
import os
import pathlib
import signal
from collections.abc import Callable, Generator, Iterator
from typing import Any

import hypothesis
import pytest
import redis
from xdist.scheduler import LoadFileScheduling

from lookonce.local.local_stack import LocalStack
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.logs import configure_plainly
from lookonce.model.libraries import torchvision_import
from lookonce.server.telemetry import configure_logging
from lookonce.store.embedding_store import EmbeddingStore
from tests.torchvision_families import HAS_TORCHVISION, TORCHVISION_FAMILIES
from tests.warm_processes import WarmProcesses

# Nothing is downloaded; tiny models are faster on one thread, and the servers need the other core.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"
# Services set the same value, see lookonce/model/kernels/openmp.py. By default waiting threads spin on processors that
# others need: at a load of 20 a test took 180 s instead of 11 s, 2026-11-23.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Triton, where it is installed, asks for its interpreter when it is imported, which other libraries do for us.
if not pathlib.Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Tests of models whose image processors need torchvision: `make test` runs them apart.
if HAS_TORCHVISION:
    torchvision_import.import_torchvision()

# A script's background process ignores Ctrl-C, and so would the programs that tests start, to which some send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine an example takes any time, and so does making one. Fixtures that the examples of a test share are
# meant so.
hypothesis.settings.register_profile(
    "lookonce",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("lookonce")

REPOSITORY = pathlib.Path(__file__).parents[1]
DEMO_MODEL = REPOSITORY / "models" / "demo"
ONE_THREAD = ("--num-threads", "1")
# For services that share the machine with other tests: a late reply of Redis must not count as a cache miss.
SERVICE_FLAGS = (*ONE_THREAD, "--redis-budget-s", "5")
# Long enough that a busy machine does not miss it, short enough for a test of a frozen server.
_STORE_BUDGET_S = 2.0
# Files with tests that use the fixture `stack`, which takes three processes to start.
_STACK_FILES = frozenset(
    {
        "test_bad_input.py",
        "test_decoder_info.py",
        "test_encode_once.py",
        "test_examples.py",
        "test_gateway.py",
        "test_kernel_report.py",
        "test_lean_transformers.py",
        "test_metrics.py",
        "test_prefix_cache.py",
        "test_readme.py",
        "test_tracing.py",
        "test_videos.py",
    }
)
# Folders whose files take up to a minute each, and files elsewhere that take more than five seconds.
_LONG = tuple(
    REPOSITORY / "tests" / name
    for name in (
        "e2e",
        "benchmarks",
        "faults",
        "decoder_svc/runner",
        "gateway_svc/playground",
        "parity",
        "examples",
        "k8s/test_instances.py",
        "lookonce/local/test_local_stack.py",
        "lookonce/test_cli.py",
        "test_fingerprint_model.py",
        "test_tiny_models.py",
    )
)


class _Schedule(LoadFileScheduling):  # type: ignore[misc]
    """Runs each file in one of the parallel processes, and all files that use `stack` in the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "files that use the stack" if pathlib.Path(file).name in _STACK_FILES else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Schedule:
    """Distributes the tests over the parallel processes."""
    return _Schedule(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first, so that at the end no process works alone on one of them.

    Marks the tests of families whose image processors need torchvision.
    """
    for item in items:
        found = getattr(item, "callspec", None)
        if found is not None and any(value in TORCHVISION_FAMILIES for value in map(str, found.params.values())):
            item.add_marker("torchvision")
    orders = {path: (not any(map(path.is_relative_to, _LONG)), path.parts) for path in {item.path for item in items}}
    items.sort(key=lambda item: orders[item.path])


def _begin_elsewhere(config: pytest.Config) -> None:
    """Makes each of the parallel processes collect the files in an order that begins at another one.

    pytest compiles a test file when it imports it, with more information in its assertions, and keeps the result. In a
    fresh clone, processes in step would all compile all files.
    """
    number, count = (os.environ.get(f"PYTEST_XDIST_{name}") for name in ("WORKER", "WORKER_COUNT"))
    if number is None or count is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    files = [str(path) for path in sorted((REPOSITORY / "tests").rglob("test_*.py"))]
    first = len(files) * int(number.removeprefix("gw")) // int(count)
    config.args[:] = files[first:] + files[:first]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keeps all that importing and collecting make from the garbage collector: walking it takes 0.7 s each time."""
    _begin_elsewhere(session.config)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Keeps from the garbage collector, after each file, what the file leaves: modules of models, and models to share.

    A service that starts collects garbage twice. After the tests of a hundred tiny models, that took a quarter of a
    decoder's start (CPU time, AMD EPYC, 2026-11-27).
    """
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.fixture(scope="session")
def stack() -> Iterator[LocalStack]:
    """Redis, one encoder and two decoders with the demo model. Their logs begin with the modules that they import."""
    with contextlib.ExitStack() as exits:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPROFILEIMPORTTIME", "1")
            stack = exits.enter_context(
                LocalStack(DEMO_MODEL, num_decoders=2, encoder_arguments=SERVICE_FLAGS, decoder_arguments=SERVICE_FLAGS)
            )
        yield stack


@pytest.fixture(scope="session")
def warm_processes() -> Iterator[WarmProcesses]:
    """Starts processes of services in a fifth of the time."""
    with WarmProcesses() as processes:
        yield processes


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """`family_folder(name)` returns the model folder of a family of `tests/tiny_families`, with its first seed.

    All parallel processes share it, so a test that changes files makes a copy. To build all families takes five seconds
    of CPU.
    """
    from tests.tiny_families import FAMILIES

    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "family folders"
    shared.mkdir(exist_ok=True)

    def folder(name: str) -> pathlib.Path:
        path = shared / name
        if not path.exists():
            built = FAMILIES[name].build(tmp_path_factory.mktemp("built") / name)
            # Another process may have been faster.
            with contextlib.suppress(OSError):
                built.rename(path)
            assert path.exists()
        return path

    return folder


@pytest.fixture(scope="session")
def tiny_family(family_folder: Callable[[str], pathlib.Path]) -> Callable[[str], Any]:
    """`tiny_family(name)` returns the `Conformance` of a family of `tests/tiny_families`, built once per process.

    Tests share its folder, questions and runner. A test that changes a runner makes one of its own.
    """
    # They import torch, which reads the settings above.
    from tests.parity import families
    from tests.tiny_families import FAMILIES

    return functools.cache(lambda name: families.build(FAMILIES[name], family_folder(name)))


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[EmbeddedRedis]:
    """A server for tests that neither stop nor reconfigure it. It is never emptied: use fresh keys."""
    with EmbeddedRedis(512 << 20) as server:
        yield server


@pytest.fixture
def own_redis() -> Iterator[EmbeddedRedis]:
    """An empty server that the test may kill, freeze and reconfigure."""
    with EmbeddedRedis(256 << 20) as server:
        yield server


@pytest.fixture
def admin(own_redis: EmbeddedRedis) -> Iterator[Any]:
    """redis-py's own client on `own_redis`, to change settings and plant values."""
    with redis.Redis.from_url(own_redis.url) as client:
        yield client


@pytest.fixture
def make_store() -> Iterator[Callable[..., EmbeddingStore]]:
    """`make_store(url, **changes)` returns a store, which is closed after the test."""
    stores: list[EmbeddingStore] = []

    def make(url: str, **changes: Any) -> EmbeddingStore:
        arguments: dict[str, Any] = {"budget_s": _STORE_BUDGET_S, "ttl_s": 60, "max_entry_bytes": 64 << 20, **changes}
        stores.append(EmbeddingStore(url, **arguments))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture(scope="session")
def library() -> None:
    """Skips where the decoder's compiled library cannot be had."""
    # They import torch, which reads the settings above.
    from decoder_svc.runner.cpu.attention import SOURCES
    from lookonce.model.kernels.native_compiler import NativeLibraryError
    from lookonce.model.kernels.native_library import load_library

    try:
        load_library(SOURCES)
    except NativeLibraryError as error:
        pytest.skip(f"there is no native library here: {error}")


@pytest.fixture
def log_lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Everything that this process logs, parsed."""
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    configure_plainly()
    for handler in [handler for handler in logging.getLogger().handlers if handler.name == "lookonce"]:
        logging.getLogger().removeHandler(handler)
