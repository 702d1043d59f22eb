"""The layout that import contracts cannot state: public names, the ground floor of lookonce, and a light scheduler."""

from __future__ import annotations

import ast
import importlib
import pathlib
import subprocess
import sys

import pytest

import lookonce

ROOT = pathlib.Path(__file__).parents[1]
PRODUCT = ("lookonce", "encoder_svc", "decoder_svc", "gateway_svc")
# The public face: modules of lookonce/ that may import rooms.
FACE = {"__init__", "aio", "cli", "client"}
# Modules of one folder that a reader can still take in.
MAX_MODULES = 20

# Classes and functions that a public module defines: exactly these, so that a new name is a decision.
PUBLIC_NAMES = {
    "lookonce": {
        "AdminClient",
        "AsyncAdminClient",
        "AsyncClient",
        "AsyncTextStream",
        "Choice",
        "Client",
        "DecoderLoad",
        "Delta",
        "Encoding",
        "GenerateOptions",
        "Generation",
        "ImageFetcher",
        "ImageRef",
        "LookonceError",
        "Message",
        "ModelInfo",
        "PromptEmbedding",
        "RequestOptions",
        "Score",
        "Scoring",
        "TextPrompt",
        "TextStream",
        "TokenPrompt",
        "TokenizedPrompt",
        "Tool",
        "ToolCall",
        "ToolCallDelta",
        "Usage",
        "Video",
        "__version__",
    },
    "lookonce.admin": {"CacheStats", "EntryStats", "EvictedImage", "TierStats"},
    "lookonce.generation": {
        "Choice",
        "Delta",
        "GenerateOptions",
        "Generation",
        "Message",
        "PromptEmbedding",
        "RequestOptions",
        "Score",
        "Scoring",
        "TextPrompt",
        "TokenPrompt",
        "Tool",
        "ToolCall",
        "ToolCallDelta",
        "Usage",
    },
    "lookonce.images": {"BinaryFile", "Encoding", "ImageRef", "PilImage", "as_image", "as_images"},
    "lookonce.decoder_info": {"DecoderLoad", "ImageSpan", "ModelInfo", "TokenizedPrompt"},
    "lookonce.testing": {"FakeRequest", "FakeServer"},
    "lookonce.videos": {"Video"},
    "lookonce.errors": {
        "AbortedError",
        "CacheAccessError",
        "ConfigurationError",
        "ContextTooLongError",
        "DeadlineError",
        "DigestMismatchError",
        "EmbeddingNotCachedError",
        "FingerprintMismatchError",
        "ImageCountError",
        "ImageDecodeLimitError",
        "ImagePoisonousError",
        "ImageTooLargeError",
        "ImageUndecodableError",
        "InternalError",
        "InvalidInputError",
        "InvalidParameterError",
        "LookonceError",
        "MessageTooLargeError",
        "ModelFolderError",
        "OverloadedError",
        "PermissionDeniedError",
        "PlaceholderMismatchError",
        "PromptEmptyError",
        "StartupError",
        "UnauthenticatedError",
        "UnavailableError",
        "UnsupportedError",
        "located_in_image",
    },
}


def _modules(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in sorted(folder.glob("*.py")) if "_pb2" not in path.name]


def _imports(path: pathlib.Path) -> set[str]:
    """Dotted names of all modules and members that a file imports, also late."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("module", sorted(PUBLIC_NAMES))
def test_public_names_stay_where_clients_import_them(module: str) -> None:
    loaded = importlib.import_module(module)
    defined = {
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    }
    assert defined | set(getattr(loaded, "__all__", ())) == PUBLIC_NAMES[module]


def test_the_names_of_the_package_are_those_of_its_modules() -> None:
    assert set(lookonce.__all__) <= set(dir(lookonce))
    for name in set(lookonce.__all__) - {"__version__"}:
        value = getattr(lookonce, name)
        assert value is getattr(importlib.import_module(value.__module__), name)


def test_importing_the_package_imports_no_grpc() -> None:
    code = "import lookonce, lookonce.errors, sys; print('grpc' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


@pytest.mark.parametrize("service", ["encoder_svc", "decoder_svc"])
def test_services_are_started_as_modules(service: str) -> None:
    assert (ROOT / service / "__main__.py").exists()


def test_modules_directly_in_lookonce_import_no_room() -> None:
    rooms = {path.parent.name for path in (ROOT / "lookonce").glob("*/__init__.py")}
    assert {"admin", "families", "media", "model", "store", "server", "sdk", "local"} <= rooms
    upward = {
        (path.stem, name)
        for path in _modules(ROOT / "lookonce")
        if path.stem not in FACE
        for name in _imports(path)
        if name.startswith("lookonce.") and name.split(".")[1] in rooms
    }
    assert upward == set()


def test_the_redis_protocol_imports_nothing_else_of_the_store() -> None:
    upward = {
        (path.stem, name)
        for path in _modules(ROOT / "lookonce/store/redis")
        for name in _imports(path)
        if name.startswith("lookonce.store.") and not name.startswith("lookonce.store.redis")
    }
    assert upward == set()


def test_importing_the_scheduler_loads_no_third_party_package() -> None:
    folder = ROOT / "decoder_svc/scheduling"
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in folder.rglob("*.py")]
    program = (
        "import importlib, sys\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded - sys.stdlib_module_names - {'lookonce', 'decoder_svc', '__main__'}))"
    )
    # -S: the virtual environment's own start-up files load nothing.
    finished = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert finished.stdout.strip() == "[]"


def test_no_folder_has_more_modules_than_a_reader_can_take_in() -> None:
    sizes = {
        str(folder.relative_to(ROOT)): len(_modules(folder))
        for package in PRODUCT
        for folder in [ROOT / package, *(path for path in (ROOT / package).rglob("*") if path.is_dir())]
    }
    # One data file for each family of models.
    del sizes["lookonce/families"]
    assert {folder: size for folder, size in sizes.items() if size > MAX_MODULES} == {}
