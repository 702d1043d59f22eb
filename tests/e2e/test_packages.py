"""The wheel and the source distribution, built and installed as a newcomer installs them."""

from __future__ import annotations

import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence

import pytest

from lookonce.model.kernels.native_compiler import (
    NativeLibraryError,
    build_fingerprint,
    find_compiler,
    library_name,
    machine_levels,
)
from tests.conftest import REPOSITORY

# Installing takes seconds, but minutes on a machine that is busy with other tests.
pytestmark = pytest.mark.timeout(900)

_PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
_PACKAGES = ("lookonce", "encoder_svc", "decoder_svc", "gateway_svc")
_SDIST_ROOT = {*_PACKAGES, "protos", "hatch_build.py", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"}
# Added by the build backend.
_SDIST_ROOT |= {"PKG-INFO", ".gitignore"}
_SUFFIXES = {".py", ".pyi", ".typed", ".cpp", ".h", ".proto", ".html", ".css", ".js", ".svg"}
_MAX_FILE_BYTES = 1 << 20
_NOTHING: Mapping[str, str] = {}
# Folders of C++ sources; each becomes a library.
_KERNELS = ("lookonce/model/kernels/native", "decoder_svc/runner/cpu/native", "encoder_svc/vision/native")
_STUB_TYPES = ("types-grpcio", "types-protobuf")
# Leftovers of work in a checkout, which no package may hold.
_LEFTOVERS = (
    "lookonce/__pycache__/cli.cpython-311.pyc",
    "lookonce/common/__pycache__/common.cpython-311.pyc",
    "lookonce/common/v1/common_pb2.py.orig",
    "lookonce/.mypy_cache/x.json",
    "lookonce/up.log",
    "encoder_svc/.hypothesis/examples",
    "decoder_svc/runner/cpu/native/step.so",
    "benchmarks/results/large.json",
    "protos/lookonce/draft.txt",
    "build/lib/lookonce/cli.py",
)


def _run(
    *command: object, cwd: pathlib.Path, check: bool = True, variables: Mapping[str, str] = _NOTHING
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder of its own, without the repository on the import path, with more `variables`.

    Python keeps the modules that it compiles, so that pip need not compile all of them.
    """
    removed = {"PYTHONPATH", "MYPYPATH", "PYTHONDONTWRITEBYTECODE"}
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    kept = {name: value for name, value in kept.items() if not name.startswith("LOOKONCE_")}
    finished = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept | {"XDG_RUNTIME_DIR": str(cwd), "COLUMNS": "200", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert not check or finished.returncode == 0, finished.stdout + finished.stderr
    return finished


def _environment(folder: pathlib.Path) -> pathlib.Path:
    """Makes an environment with nothing but Python, and returns its interpreter."""
    _run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    return folder / "bin" / "python"


def _install(python: pathlib.Path, *packages: object) -> subprocess.CompletedProcess[str]:
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", *packages)
    return _run(*pip, cwd=python.parent, check=False)


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The interpreter of an environment that has what a build needs."""
    python = _environment(tmp_path_factory.mktemp("builder") / "venv")
    installed = _install(python, *_PROJECT["build-system"]["requires"])
    if installed.returncode != 0:
        pytest.skip(f"the packages that a build needs cannot be had here: {installed.stderr.strip()[-200:]}")
    return python


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A copy of the repository with leftovers, since a build writes stubs into its tree."""
    target = tmp_path_factory.mktemp("tree") / "lookonce"
    ignored = shutil.ignore_patterns(".git", ".venv", "dist", "build", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(REPOSITORY, target, ignore=ignored)
    for name in _LEFTOVERS:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(b"0" * (2 * _MAX_FILE_BYTES if "large" in name else 1))
    return target


def _built(
    builder: pathlib.Path, kind: str, tree: pathlib.Path, target: pathlib.Path, variables: Mapping[str, str] = _NOTHING
) -> pathlib.Path:
    """Builds a `wheel` or an `sdist` of a tree into a folder, and returns the file."""
    _run(builder, "-m", "hatchling", "build", "--target", kind, "--directory", target, cwd=tree, variables=variables)
    (file,) = target.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(builder: pathlib.Path, tree: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The wheel of the tree."""
    return _built(builder, "wheel", tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(builder: pathlib.Path, tree: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The unpacked source distribution of the tree."""
    archive = _built(builder, "sdist", tree, tmp_path_factory.mktemp("sdist"))
    target = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as file:
        file.extractall(target, filter="data")
    (folder,) = target.iterdir()
    return folder


@pytest.fixture(scope="module")
def clean(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The programs' folder of an environment with the wheel and what it depends on, without extras."""
    python = _environment(tmp_path_factory.mktemp("clean") / "venv")
    installed = _install(python, wheel)
    assert installed.returncode == 0, installed.stderr
    return python.parent


def test_the_source_distribution_holds_sources_only(sdist: pathlib.Path) -> None:
    assert {path.name for path in sdist.iterdir()} == _SDIST_ROOT
    files = [path for path in sdist.rglob("*") if path.is_file() and path.parent != sdist]
    assert {path.suffix for path in files} == _SUFFIXES
    assert [path for path in files if path.stat().st_size > _MAX_FILE_BYTES] == []
    assert [path for path in files if any(part.startswith((".", "__pycache__")) for part in path.parts[-3:])] == []
    assert [name for name in _LEFTOVERS if (sdist / name).exists()] == []


def test_the_wheel_holds_the_four_packages_and_nothing_else(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    info = f"lookonce-{_PROJECT['project']['version']}.dist-info"
    assert {name.partition("/")[0] for name in names} == {*_PACKAGES, info}
    assert {pathlib.PurePath(name).suffix for name in names if not name.startswith(info)} == _SUFFIXES - {".proto"}
    assert names >= {f"{package}/py.typed" for package in _PACKAGES}
    assert names.isdisjoint(_LEFTOVERS)


def test_both_hold_all_sources_of_kernels(wheel: pathlib.Path, sdist: pathlib.Path, tree: pathlib.Path) -> None:
    sources = {
        str(path.relative_to(tree))
        for package in _PACKAGES
        for suffix in ("cpp", "h")
        for path in (tree / package).rglob(f"*.{suffix}")
    }
    assert len(sources) > 10
    with zipfile.ZipFile(wheel) as file:
        assert sources <= set(file.namelist())
    assert all((sdist / name).is_file() for name in sources)


# Services name the same folders, see `_compiler`. Importing the services would take three seconds of CPU.
_LOADS_KERNELS = """\
import pathlib
import sys

import lookonce
from lookonce.model.kernels.native_level import processor_levels
from lookonce.model.kernels.native_library import cache_folder, library_of_level

site = pathlib.Path(lookonce.__file__).parents[1]
for level in processor_levels():
    for sources in sys.argv[1:]:
        library_of_level(site / sources, level)
print(site, cache_folder().exists())
"""


# Compiling all libraries takes a minute. This compiler takes those that are there. Of the others, it compiles the
# products of matrices without optimisation, since levels differ most there, and checks the syntax of the rest.
_COMPILER = """\
#!/bin/sh
set -e
output() {{ while test "$1" != -o; do shift; done; echo "$2"; }}
to=$(output "$@")
case " $* " in *" -c "*) echo "$@" > "$to"; exit;; esac
ready={ready}/$(basename "$to")
if test -e "$ready"; then exec cp "$ready" "$to"; fi
for object; do
    case "$object" in
        */linear.o) {compiler} $(cat "$object") -O0;;
        *.o) {compiler} $(cat "$object") -fsyntax-only; cp {empty} "$object";;
    esac
done
exec {compiler} "$@"
"""


def _compiler(folder: pathlib.Path) -> pathlib.Path:
    """Returns a compiler that copies the libraries of this processor's levels from where services look for them.

    Other tests need these libraries, too.
    """
    # They import torch.
    from decoder_svc.runner.cpu import attention
    from encoder_svc.vision import dense_attention
    from lookonce.model.kernels import native_linear
    from lookonce.model.kernels.native_level import processor_levels
    from lookonce.model.kernels.native_library import library_of_level, trusted_cache_folder

    all_sources = (native_linear.SOURCES, attention.SOURCES, dense_attention.SOURCES)
    assert [str(sources.relative_to(REPOSITORY)) for sources in all_sources] == list(_KERNELS)
    (folder / "ready").mkdir(parents=True)
    for level in processor_levels():
        for sources in all_sources:
            library_of_level(sources, level)
            built = trusted_cache_folder() / f"lookonce-{build_fingerprint(find_compiler(), level, sources)}.so"
            shutil.copyfile(built, folder / "ready" / library_name(sources, level))
    compiler, empty = folder / "compiler", folder / "empty.o"
    _run(find_compiler(), "-x", "c++", "-c", "-o", empty, "/dev/null", cwd=folder)
    compiler.write_text(_COMPILER.format(ready=folder / "ready", compiler=find_compiler(), empty=empty))
    compiler.chmod(0o755)
    return compiler


def test_a_wheel_with_compiled_kernels_needs_no_compiler(
    builder: pathlib.Path, tree: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    try:
        find_compiler()
    except NativeLibraryError:
        pytest.skip("there is no C++ compiler here")
    machine = platform.machine()
    variables = {"LOOKONCE_NATIVE_WHEEL": machine, "CXX": str(_compiler(tmp_path / "compiler"))}
    file = _built(builder, "wheel", tree, tmp_path / "native", variables)
    assert file.name.endswith(f"-py3-none-manylinux_2_28_{machine}.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(file) as archive:
        archive.extractall(site)
    libraries = sorted((site / "lookonce/model/kernels/compiled").iterdir())
    levels = [level.name for level in machine_levels()]
    assert sorted(path.name.rpartition("-")[0] for path in libraries) == sorted(levels * 3)
    nowhere = {"PATH": "", "CXX": "none", "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(site)}
    ran = _run(sys.executable, "-c", _LOADS_KERNELS, *_KERNELS, cwd=tmp_path, variables=nowhere)
    assert ran.stdout.split() == [str(site), "False"]
    # The platform tag promises this (https://peps.python.org/pep-0600/, policy of manylinux_2_28).
    optimised = [path for path in libraries if (tmp_path / "compiler/ready" / path.name).exists()]
    assert optimised
    for name, newest in (("GLIBC", (2, 28)), ("GLIBCXX", (3, 4, 25)), ("CXXABI", (1, 3, 11))):
        for path in optimised:
            needed = re.findall(rf"\b{name}_([\d.]+)\b".encode(), path.read_bytes())
            assert max((tuple(map(int, one.split(b"."))) for one in needed), default=(0,)) <= newest, path.name


def test_the_wheel_of_the_source_distribution_equals_that_of_the_tree(
    wheel: pathlib.Path, sdist: pathlib.Path, builder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    again = _built(builder, "wheel", sdist, tmp_path / "again")
    assert again.name == wheel.name
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
        assert [name for name in one.namelist() if one.read(name) != other.read(name)] == []


def _documented_programs() -> list[str]:
    """Returns the programs that a test runs, of the first page and of the SDK's."""
    pages = "".join((REPOSITORY / name).read_text() for name in ("README.md", "docs/sdk.md"))
    return re.findall(r"^<!-- run by \S+ -->\n```python\n(.*?)^```", pages, re.MULTILINE | re.DOTALL)


_ASYNC_PROGRAM = """\
import asyncio
import pathlib

import lookonce
from lookonce.errors import LookonceError, OverloadedError
from lookonce.generation import Generation, Message
from lookonce.images import ImageRef


async def ask(question: str, picture: pathlib.Path) -> Generation:
    async with lookonce.AsyncClient.connect("127.0.0.1:50051", token="secret") as client:
        (ref,) = await client.encode([picture])
        assert ref.encoding is not None
        print(ref.encoding.num_rows)
        try:
            async with client.stream([Message("user", [ref, question])], max_tokens=16, timeout_s=5.0) as stream:
                async for piece in stream:
                    print(piece.upper())
            return stream.generation
        except OverloadedError as error:
            await asyncio.sleep(error.retry_after_s)
            return await client.generate(question, images=[ImageRef.from_file(picture)])
        except LookonceError as error:
            print(error.metadata.get("field"), error.message)
            raise


print(asyncio.run(ask("What is it?", pathlib.Path("a.png"))).usage.prompt_tokens + 1)
"""


def _checked(programs: Sequence[str], clean: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Runs mypy over users' programs, with the packages of the clean environment; returns what it says of each."""
    names = [f"program_{number}.py" for number in range(len(programs))]
    for name, program in zip(names, programs, strict=True):
        (folder / name).write_text(program)
    # mypy reads the packages once for all programs, and what two environments share once for both.
    cache = f"--cache-dir={clean.parent.parent / 'mypy'}"
    flags = ("--strict", cache, "--config-file=", f"--python-executable={clean / 'python'}")
    found = _run(sys.executable, "-P", "-m", "mypy", *flags, *names, cwd=folder, check=False)
    *lines, last = found.stdout.splitlines()
    assert re.fullmatch(rf"Found \d+ errors in \d+ files? \(checked {len(names)} source files\)", last), last
    said = ["".join(line for line in lines if line.startswith(f"{name}:")) for name in names]
    assert sum(map(len, said)) == sum(map(len, lines)), "mypy found fault with something else than the programs"
    return said


def test_mypy_checks_a_users_program(clean: pathlib.Path, tmp_path: pathlib.Path) -> None:
    sdk_programs = [program for program in _documented_programs() if "import grpc" not in program]
    assert len(sdk_programs) == 4
    wrong = sdk_programs[0] + "    answer.text + 1\n    client.generate('x', max_token=3)\n"
    unknown = "import lookonce\n\nlookonce.Cleint\n"
    *right, of_wrong, of_unknown = _checked([*sdk_programs, _ASYNC_PROGRAM, wrong, unknown], clean, tmp_path)
    assert right == [""] * 5
    assert "Unsupported operand types" in of_wrong
    assert "max_token" in of_wrong
    assert 'has no attribute "Cleint"' in of_unknown


def test_mypy_checks_a_program_with_the_stubs(
    clean: pathlib.Path, tmp_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    python = _environment(tmp_path_factory.mktemp("typed") / "venv")
    installed = _install(python, *_STUB_TYPES)
    assert installed.returncode == 0, installed.stderr
    # The wheel is in the clean environment. Another installation of it would take five seconds of CPU.
    (packages,) = clean.parent.glob("lib/python*/site-packages")
    (own_packages,) = python.parent.parent.glob("lib/python*/site-packages")
    (own_packages / "clean.pth").write_text(f"{packages}\n")
    (program,) = [program for program in _documented_programs() if "import grpc" in program]
    wrong = program + "    event.delta.text + 1\n    event.nothing\n"
    of_right, of_wrong = _checked([program, wrong], python.parent, tmp_path)
    assert of_right == ""
    assert "Unsupported operand types" in of_wrong
    assert 'has no attribute "nothing"' in of_wrong


def _command(clean: pathlib.Path, folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _run(clean / "lookonce", *arguments, cwd=folder, check=False)


# Runs commands one after another. A process for each would import the same libraries again.
_SHOWS_HELP = """\
import sys

from lookonce.cli import main

for name in sys.argv[1:]:
    sys.argv = ["lookonce", name, "--help"]
    try:
        main()
    except SystemExit as end:
        print("status", name, end.code)
"""


def test_without_extras_the_command_explains_itself(clean: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shown = _command(clean, tmp_path, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    names = (
        "up",
        "serve",
        "generate",
        "chat",
        "encode",
        "cache",
        "config",
        "top",
        "bench",
        "models",
        "token",
        "doctor",
    )
    for name in names:
        assert re.search(rf"^\W*{name} ", shown.stdout, re.MULTILINE), name
    of_each = _run(clean / "python", "-P", "-c", _SHOWS_HELP, *names, cwd=tmp_path)
    assert re.findall(r"^status (\w+) (\w+)$", of_each.stdout, re.MULTILINE) == [(name, "0") for name in names]


@pytest.mark.parametrize(
    "arguments",
    ["up", "up --model /none", "serve encoder --model /none", "serve decoder --help", "token someone"],
)
def test_without_the_extra_commands_that_need_it_say_what_to_install(
    arguments: str, clean: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    finished = _command(clean, tmp_path, *arguments.split())
    assert (finished.returncode, finished.stdout) == (2, "")
    (line,) = finished.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith("pip install 'lookonce[serve]'")


@pytest.mark.parametrize("module", ["encoder_svc", "decoder_svc"])
def test_without_the_extra_a_service_says_what_to_install(
    module: str, clean: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    finished = _run(clean / "python", "-P", "-m", module, "--model", "/none", cwd=tmp_path, check=False)
    assert (finished.returncode, finished.stdout) == (2, "")
    (line,) = finished.stderr.splitlines()
    assert line.endswith("pip install 'lookonce[serve]'")


@pytest.mark.parametrize("arguments", ["-m gateway_svc", "-m lookonce.cli serve gateway --help"])
def test_without_its_extra_the_gateway_says_what_to_install(
    arguments: str, clean: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    finished = _run(clean / "python", "-P", *arguments.split(), cwd=tmp_path, check=False)
    assert (finished.returncode, finished.stdout) == (2, "")
    (line,) = finished.stderr.splitlines()
    assert line.endswith("pip install 'lookonce[gateway]'")


def test_without_the_extra_the_doctor_names_it_and_the_client_commands_work(
    clean: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    report = _command(clean, tmp_path, "doctor", "--model", str(REPOSITORY / "models" / "demo"))
    assert report.returncode == 1, report.stderr
    assert "Traceback" not in report.stderr
    faults = [line for line in report.stdout.splitlines() if line.startswith("no\t")]
    assert faults
    assert all("pip install 'lookonce[serve]'" in line for line in faults)
    assert _command(clean, tmp_path, "models").returncode == 0
    for_clients = _command(clean, tmp_path, "doctor")
    assert (for_clients.returncode, for_clients.stderr) == (0, "")
    assert re.search(r"^ok\tservices\tnot installed", for_clients.stdout, re.MULTILINE)
    asked = _command(clean, tmp_path, "generate", "hello", "--target", "127.0.0.1:1", "--timeout-s", "2")
    assert asked.returncode == 1
    assert asked.stderr.startswith("error: ")
