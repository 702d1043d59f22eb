"""`make contract` refuses changes of the contract that would break a client of the last release, and no others."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

BUF = pathlib.Path(sys.executable).parent / "buf"
RELEASED = REPOSITORY / "protos/released.binpb"
DECODER = "protos/lookonce/decoder/v1/decoder_service.proto"
ENCODER = "protos/lookonce/encoder/v1/encoder_service.proto"
COMMON = "protos/lookonce/common/v1/common.proto"


def buf(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BUF, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def breaking(folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Compares the contract in a folder with that of the last release, by the rules of this repository."""
    return buf(folder, "breaking", "--against", str(RELEASED))


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the contract as it is now, with its rules."""
    shutil.copy(REPOSITORY / "buf.yaml", tmp_path)
    shutil.copytree(REPOSITORY / "protos", tmp_path / "protos")
    return tmp_path


def edit(tree: pathlib.Path, file: str, old: str, new: str) -> None:
    path = tree / file
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_make_contract_compares_with_the_last_release() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    (recipe,) = re.findall(r"^contract: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert "buf breaking --against $(RELEASED_CONTRACT)\n" in recipe
    assert f"\nRELEASED_CONTRACT := {RELEASED.relative_to(REPOSITORY)}\n" in makefile
    finished = breaking(REPOSITORY)
    assert finished.returncode == 0, finished.stdout


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        pytest.param(
            DECODER,
            "optional uint32 max_tokens = 6;",
            "optional uint32 max_new_tokens = 6;",
            'Field "6" on message "SamplingParams" changed name from "max_tokens" to "max_new_tokens"',
            id="another name of a field",
        ),
        pytest.param(
            DECODER,
            "optional uint32 max_tokens = 6;",
            "optional uint32 max_tokens = 60;",
            'Previously present field "6" with name "max_tokens" on message "SamplingParams" was deleted',
            id="another number of a field",
        ),
        pytest.param(
            DECODER,
            "optional uint64 seed = 9;",
            "optional int64 seed = 9;",
            'Field "9" with name "seed" on message "SamplingParams" changed type from "uint64" to "int64"',
            id="another type of a field",
        ),
        # Other categories let this pass: programs that set the field would no longer compile.
        pytest.param(
            DECODER,
            "  int32 priority = 7;\n",
            '  reserved 7;\n  reserved "priority";\n',
            'Previously present field "7" with name "priority" on message "GenerateParams" was deleted',
            id="a deleted field",
        ),
        pytest.param(
            DECODER,
            "  // Stops a running request. Cancelling its RPC has the same effect.\n"
            "  rpc AbortRequest(AbortRequestRequest) returns (AbortRequestResponse) {\n"
            "    option idempotency_level = IDEMPOTENT;\n"
            "  }\n",
            "",
            'Previously present RPC "AbortRequest" on service "DecoderService" was deleted',
            id="a deleted call",
        ),
        pytest.param(
            COMMON,
            "HASH_ALGORITHM_BLAKE3 = 2;",
            "HASH_ALGORITHM_BLAKE3_256 = 2;",
            'changed name from "HASH_ALGORITHM_BLAKE3" to "HASH_ALGORITHM_BLAKE3_256"',
            id="another name of an enum value",
        ),
    ],
)
def test_a_change_that_breaks_clients_is_refused(
    tree: pathlib.Path, file: str, old: str, new: str, message: str
) -> None:
    edit(tree, file, old, new)
    finished = breaking(tree)
    assert finished.returncode != 0
    assert message in finished.stdout


def test_a_message_stays_in_its_file(tree: pathlib.Path) -> None:
    """In Python and TypeScript, a client imports files."""
    text = (tree / COMMON).read_text()
    begin, end = text.index("// Width and height in pixels.\n"), text.index("// Shape and key of one image")
    package = "package lookonce.common.v1;\n"
    imported = 'import "lookonce/common/v1/pixel_size.proto";\n'
    (tree / COMMON).with_name("pixel_size.proto").write_text(f'syntax = "proto3";\n\n{package}\n{text[begin:end]}')
    (tree / COMMON).write_text((text[:begin] + text[end:]).replace(package, f"{package}\n{imported}"))
    for file in (DECODER, ENCODER):
        old = 'import "lookonce/common/v1/common.proto";\n'
        edit(tree, file, old, old + imported)
    finished = breaking(tree)
    assert finished.returncode != 0
    assert 'Previously present message "PixelSize" was deleted from file' in finished.stdout


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        pytest.param(
            DECODER,
            "  string cache_salt = 8;\n",
            "  string cache_salt = 8;\n  // A new field.\n  string session = 11;\n",
            id="a new field",
        ),
        pytest.param(
            DECODER,
            "// Request of Tokenize.\n",
            "// A new message.\nmessage Warmup {}\n\n// Request of Tokenize.\n",
            id="a new message",
        ),
        pytest.param(
            COMMON,
            "  HASH_ALGORITHM_BLAKE3 = 2;\n",
            "  HASH_ALGORITHM_BLAKE3 = 2;\n  // A new value.\n  HASH_ALGORITHM_SHA3 = 3;\n",
            id="a new enum value",
        ),
        pytest.param(DECODER, "// Token ids.\n  repeated", "// Ids of tokens.\n  repeated", id="another comment"),
    ],
)
def test_a_change_that_clients_do_not_notice_passes(tree: pathlib.Path, file: str, old: str, new: str) -> None:
    edit(tree, file, old, new)
    finished = breaking(tree)
    assert finished.returncode == 0, finished.stdout


def test_the_file_of_the_last_release_is_what_make_release_contract_writes(tree: pathlib.Path) -> None:
    # A field that is new since then is in the new file, so that later changes of it are refused.
    edit(
        tree, DECODER, "  string cache_salt = 8;\n", "  string cache_salt = 8;\n  // A new field.\n  string tag = 11;\n"
    )
    (recipe,) = re.findall(r"^release-contract: .*\n((?:\t.*\n)+)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    commands = [line.split() for line in recipe.replace("$(RELEASED_CONTRACT)", "protos/released.binpb").splitlines()]
    for command in commands:
        assert command[0] == "@$(BIN)/buf"
        finished = buf(tree, *command[1:])
        assert finished.returncode == 0, finished.stdout + finished.stderr
    edit(tree, DECODER, "string tag = 11;", "string label = 11;")
    finished = buf(tree, "breaking", "--against", "protos/released.binpb")
    assert finished.returncode != 0
    assert 'changed name from "tag" to "label"' in finished.stdout
