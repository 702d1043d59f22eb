"""Forbidden calls and imports in the product, as SECURITY.md lists them."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("lookonce", "encoder_svc", "decoder_svc", "gateway_svc")
# Data that becomes code, or addresses that come from a request.
_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
_CALLS = {
    "torch.load": "a pickle",
    "numpy.load": "may be a pickle",
    "np.load": "may be a pickle",
    "yaml.load": "makes objects",
    "yaml.unsafe_load": "makes objects",
    "eval": "runs text",
    "exec": "runs text",
    "compile": "runs text",
    "hash": "differs between processes and collides on purpose",
    "os.system": "runs text",
    "os.popen": "runs text",
    "requests.get": "fetches an address",
    "httpx.get": "fetches an address",
    "urllib.request.urlretrieve": "fetches an address",
}
_METHODS = {"eval", "evalsha", "fcall", "register_script"}
_FETCHING_MODULES = {"requests", "httpx", "aiohttp", "urllib3", "ftplib", "http.client"}
# (file, what): why it is not what it looks like.
_ALLOWED = {
    ("lookonce/local/metrics_page.py", "http.client"): "names the errors of the next one",
    ("lookonce/local/metrics_page.py", "urllib.request"): "reads metrics of services that the command line names",
    ("lookonce/sdk/image_fetcher.py", "http.client"): "fetches from hosts that its caller has listed, in the client",
}


def source_files() -> list[pathlib.Path]:
    """Everything that is shipped but what was generated."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return [path for path in files if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))]


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        prefix = dotted(node.value)
        return f"{prefix}.{node.attr}" if prefix else ""
    return ""


def offences(path: str, source: str) -> Iterator[str]:
    """Yields each forbidden use as `line: what`."""
    for node in ast.walk(ast.parse(source)):
        found = _offence(node)
        if found is not None and (path, found) not in _ALLOWED:
            yield f"{getattr(node, 'lineno', 0)}: {found}"


def _offence(node: ast.AST) -> str | None:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names]
        modules = names if isinstance(node, ast.Import) else [node.module or ""]
        whole = {*modules, *(f"{modules[0]}.{name}" for name in names)}
        for module in sorted(whole):
            if module.partition(".")[0] in _MODULES or module in _FETCHING_MODULES | {"urllib.request"}:
                return module
    if isinstance(node, ast.Call):
        name = dotted(node.func)
        if name in _CALLS:
            return name
        if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS and not _is_module_mode(node):
            return node.func.attr
        if name == "subprocess.run" or name.startswith("subprocess."):
            for keyword in node.keywords:
                if keyword.arg == "shell":
                    return "shell"
    if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
        is_off = isinstance(node.value, ast.Constant) and node.value.value is False
        return None if is_off else node.arg
    return None


def _is_module_mode(node: ast.Call) -> bool:
    """`module.eval()` of a PyTorch module has no arguments; a script's has."""
    return not node.args and not node.keywords


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_contains_forbidden_code(path: pathlib.Path) -> None:
    assert list(offences(str(path.relative_to(ROOT)), path.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle.cloudpickle",
        "torch.load(path)",
        "np.load(path)",
        "yaml.load(text)",
        "eval(text)",
        "exec(text)",
        "key = hash(image)",
        "client.eval(script, 0)",
        "client.register_script(text)",
        "AutoModel.from_pretrained(folder, trust_remote_code=True)",
        "AutoModel.from_pretrained(folder, trust_remote_code=flag)",
        "np.frombuffer(x, allow_pickle=True)",
        "import requests",
        "from urllib import request",
        "import urllib.request",
        "from http.client import HTTPSConnection",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
    ],
)
def test_each_of_these_is_noticed(source: str) -> None:
    assert len(list(offences("file.py", source))) == 1


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "import urllib.parse", "AutoModel.from_pretrained(x, trust_remote_code=False)", "a.hash(x)"],
)
def test_code_that_only_looks_forbidden_is_allowed(source: str) -> None:
    assert list(offences("file.py", source)) == []


def test_no_exception_is_kept_that_nothing_needs() -> None:
    for path, what in _ALLOWED:
        assert what in [found.partition(": ")[2] for found in offences("another.py", (ROOT / path).read_text("utf-8"))]
