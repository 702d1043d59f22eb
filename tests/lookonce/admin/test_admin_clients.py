"""Both clients of operators' calls and `lookonce cache evict`, against a real encoder with tokens and a real Redis."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
import redis

import lookonce
from lookonce.admin import CacheStats, EntryStats, EvictedImage
from lookonce.errors import (
    AbortedError,
    CacheAccessError,
    InvalidParameterError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
from lookonce.images import ImageRef
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.local.token_entry import new_token
from tests.conftest import DEMO_MODEL, ONE_THREAD
from tests.e2e.pictures import fresh
from tests.in_process_stack import InProcessStack
from tests.lookonce.command import run_here

ROOT = pathlib.Path(__file__).parents[3]
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Encoder:
    """One running encoder that asks for tokens."""

    stack: InProcessStack
    # By role.
    tokens: dict[str, str]

    @property
    def target(self) -> str:
        """Address of the operators' calls."""
        return self.stack.admin_targets[0]

    def encode(self, *pictures: bytes) -> None:
        """Puts images of the default tenant into the caches."""
        (target,) = self.stack.encoder_targets
        with lookonce.Client.connect(target, target, token=self.tokens["service"]) as client:
            client.encode(pictures)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encoder]:
    tokens, entries = {}, ""
    for role in ("operator", "service"):
        tokens[role], entry = new_token(role, "", role)
        entries += entry
    path = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    path.write_text(entries)
    arguments = (*ONE_THREAD, "--redis-budget-s", "0.5", "--auth-tokens-file", str(path))
    with InProcessStack(DEMO_MODEL, num_decoders=0, encoder_arguments=arguments) as stack:
        yield Encoder(stack, tokens)


class Calls(Protocol):
    """The methods that both clients have, called without waiting for an event loop."""

    def __call__(self, target: str, token: str | None, method: str, *arguments: Any, **keywords: Any) -> Any: ...


def sync_call(target: str, token: str | None, method: str, *arguments: Any, **keywords: Any) -> Any:
    with lookonce.AdminClient.connect(target, token=token, timeout_s=TIMEOUT_S) as client:
        return getattr(client, method)(*arguments, **keywords)


def asyncio_call(target: str, token: str | None, method: str, *arguments: Any, **keywords: Any) -> Any:
    async def run() -> Any:
        async with lookonce.AsyncAdminClient.connect(target, token=token, timeout_s=TIMEOUT_S) as client:
            return await getattr(client, method)(*arguments, **keywords)

    return asyncio.run(run())


@pytest.fixture(params=[sync_call, asyncio_call], ids=["sync", "asyncio"])
def call(request: pytest.FixtureRequest) -> Calls:
    calls: Calls = request.param
    return calls


def test_an_operator_looks_at_pins_prewarms_and_removes_images(
    encoder: Encoder, call: Calls, tmp_path: pathlib.Path
) -> None:
    target, token = encoder.target, encoder.tokens["operator"]
    known, unknown = (picture.data for picture in fresh(2))
    encoder.encode(known)
    path = tmp_path / "known.png"
    path.write_bytes(known)
    refs = [ImageRef.from_bytes(known), ImageRef.from_bytes(unknown)]
    assert call(target, token, "pin", [path, unknown]) == [True, False]
    found, absent = call(target, token, "describe", refs)
    assert isinstance(found, EntryStats)
    assert (found.image, found.cached, found.cached_locally, found.pinned) == (refs[0], True, True, True)
    assert found.ttl_s is None
    assert found.size_bytes > 4096
    assert (absent.image, absent.cached, absent.size_bytes, absent.ttl_s) == (refs[1], False, 0, None)
    assert call(target, token, "pin", refs, unpin=True) == [True, False]
    (unpinned,) = call(target, token, "describe", refs[:1])
    assert unpinned.ttl_s > 0
    assert call(target, token, "prewarm", refs) == [True, False]
    stats = call(target, token, "stats")
    assert isinstance(stats, CacheStats)
    assert min(stats.local.entries, stats.shared.entries, stats.local.size_bytes, stats.shared.size_bytes) > 0
    evicted = call(target, token, "evict", [path, unknown, known])
    assert evicted == [EvictedImage(refs[0], 1, 0), EvictedImage(refs[1], 0, 0), EvictedImage(refs[0], 1, 0)]
    assert [one.found for one in evicted] == [True, False, True]
    assert [one.found for one in call(target, token, "evict", [ImageRef.from_digest(refs[0].digest)])] == [False]


def test_options_select_entries_and_a_removal_takes_all_of_them(encoder: Encoder, call: Calls) -> None:
    (picture,) = fresh(1)
    encoder.encode(picture.data)
    refs = [ImageRef.from_bytes(picture.data, max_pixels=max_pixels) for max_pixels in (None, 5000, None)]
    states = call(encoder.target, encoder.tokens["operator"], "describe", refs)
    assert [state.cached for state in states] == [True, False, True]
    (evicted,) = call(encoder.target, encoder.tokens["operator"], "evict", refs[1:2])
    assert evicted.entries == 1


def test_a_tenant_and_a_model_are_removed_as_a_whole(encoder: Encoder, call: Calls) -> None:
    target, token = encoder.target, encoder.tokens["operator"]
    encoder.encode(*(picture.data for picture in fresh(2)))
    assert call(target, token, "evict_tenant", "nobody") == 0
    assert call(target, token, "evict_tenant", "") >= 2
    encoder.encode(fresh(1)[0].data)
    assert call(target, token, "evict_all") == 1


def test_more_images_than_a_request_may_name_are_removed(encoder: Encoder, call: Calls) -> None:
    refs = [ImageRef.from_bytes(b"%d" % number) for number in range(300)]
    evicted = call(encoder.target, encoder.tokens["operator"], "evict", refs)
    assert [one.image for one in evicted] == refs


@pytest.mark.parametrize(
    ("role", "error"), [(None, UnauthenticatedError), ("service", PermissionDeniedError)], ids=["no token", "service"]
)
def test_others_than_operators_are_refused(
    encoder: Encoder, call: Calls, role: str | None, error: type[Exception]
) -> None:
    token = None if role is None else encoder.tokens[role]
    for method, *arguments in (("stats",), ("evict", [b"x"]), ("pin", [b"x"]), ("prewarm", [b"x"]), ("evict_all",)):
        with pytest.raises(error):
            call(encoder.target, token, method, *arguments)


def test_failures_have_the_errors_of_the_other_clients(encoder: Encoder, call: Calls) -> None:
    token = encoder.tokens["operator"]
    with pytest.raises(UnavailableError):
        call("127.0.0.1:1", token, "evict", [b"x"], timeout_s=10)
    with pytest.raises(UnsupportedError):
        call(encoder.stack.encoder_targets[0], token, "stats")


def test_wrong_options_have_the_errors_of_the_other_clients(encoder: Encoder, call: Calls) -> None:
    wrong: Any = "large"
    for max_pixels in (wrong, -1, 1 << 40):
        ref = ImageRef.from_bytes(b"x", max_pixels=max_pixels)
        with pytest.raises(InvalidParameterError, match="max_pixels"):
            call(encoder.target, encoder.tokens["operator"], "describe", [ref])


@pytest.mark.parametrize("method", ["evict", "pin", "prewarm", "describe"])
async def test_a_closed_client_answers_nothing_not_even_for_no_images(method: str) -> None:
    client = lookonce.AdminClient.connect("127.0.0.1:1")
    client.close()
    with pytest.raises(AbortedError):
        getattr(client, method)([])
    for_asyncio = lookonce.AsyncAdminClient.connect("127.0.0.1:1")
    await for_asyncio.aclose()
    with pytest.raises(AbortedError):
        await getattr(for_asyncio, method)([])


def variables(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOOKONCE_")}
    return kept | {"COLUMNS": "120"} | changes


def command(*arguments: str, operation: str = "evict", **changes: str) -> subprocess.CompletedProcess[str]:
    return run_here(variables(**changes), "cache", operation, *arguments)


def command_as_process(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lookonce.cli", "cache", "evict", *arguments],
        env=variables(**changes),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )


def cells(line: str) -> Sequence[str]:
    return line.replace("│", " ").split()


def test_the_command_removes_files_and_digests_and_says_what_it_found(encoder: Encoder, tmp_path: pathlib.Path) -> None:
    known, other = (picture.data for picture in fresh(2))
    encoder.encode(known, other)
    path = tmp_path / "known.png"
    path.write_bytes(known)
    digest = ImageRef.from_bytes(other).hex
    told = {"LOOKONCE_ADMIN_TARGET": encoder.target, "LOOKONCE_TOKEN": encoder.tokens["operator"]}
    for found, num_entries in (("yes", "1"), ("no", "0")):
        finished = command(str(path), digest, **told)
        assert finished.returncode == 0, finished.stderr
        rows = [cells(line) for line in finished.stdout.splitlines()]
        assert ["known.png", ImageRef.from_bytes(known).hex, found, num_entries, "0"] in rows
        assert any(row[1:] == [digest, found, num_entries, "0"] for row in rows)
    encoder.encode(known)
    finished = command("--all-of-tenant", "--target", encoder.target, LOOKONCE_TOKEN=encoder.tokens["operator"])
    assert (finished.returncode, finished.stdout) == (0, "1 entries removed\n")


def test_the_command_pins_what_is_cached_and_says_what_is_not(encoder: Encoder, tmp_path: pathlib.Path) -> None:
    known, unknown = (picture.data for picture in fresh(2))
    encoder.encode(known)
    digests = [ImageRef.from_bytes(data).hex for data in (known, unknown)]
    told = {"LOOKONCE_ADMIN_TARGET": encoder.target, "LOOKONCE_TOKEN": encoder.tokens["operator"]}
    with lookonce.AdminClient.connect(encoder.target, token=encoder.tokens["operator"]) as admin:
        pinned = command(*digests, operation="pin", **told)
        assert pinned.returncode == 1, "one of them is not pinned"
        assert "1 of 2 images are not in the shared cache" in pinned.stderr
        shown = [line.split("\t")[1:] for line in pinned.stdout.splitlines()]
        assert shown == [["digest", "pinned"], [digests[0], "yes"], [digests[1], "not cached"]]
        assert admin.describe([known])[0].pinned
        assert command(digests[0], operation="pin", **told).returncode == 0
        assert command(*digests, operation="unpin", **told).returncode == 0
        assert not admin.describe([known])[0].pinned


def test_the_command_shows_the_counters_of_both_caches(encoder: Encoder) -> None:
    encoder.encode(*(picture.data for picture in fresh(1)))
    told = {"LOOKONCE_ADMIN_TARGET": encoder.target, "LOOKONCE_TOKEN": encoder.tokens["operator"]}
    found = json.loads(command("--json", operation="stats", **told).stdout)
    assert found["local"]["entries"] > 0
    assert found["shared"]["entries"] > 0
    titles, *rows = [line.split("\t") for line in command(operation="stats", **told).stdout.splitlines()]
    assert [dict(zip(titles, row, strict=True))["entries"] for row in rows] == [
        str(found[name]["entries"]) for name in ("local", "shared")
    ]
    assert [row[0] for row in rows] == ["local", "shared"]


def test_the_command_fails_unless_all_is_forgotten(encoder: Encoder) -> None:
    for token, words in (("", "bearer token"), (encoder.tokens["service"], "role operator")):
        environment = {"LOOKONCE_TOKEN": token} if token else {}
        finished = command_as_process("0" * 64, "--target", encoder.target, **environment)
        assert finished.returncode == 1
        assert finished.stderr.startswith("error: ")
        assert words in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.png"], "neither a file nor a SHA-256 digest"),
        (["lookonce"], "is a folder"),
        ([], "give images"),
        (["0" * 64, "--all-of-tenant"], "give images"),
        (["0" * 63], "neither a file nor a SHA-256 digest"),
        (["0" * 64, "--tenant", "acme corp"], "no tenant can have this name"),
        (["--all-of-tenant", "--tenant", "*"], "no tenant can have this name"),
    ],
)
def test_a_wrong_command_line_is_a_clear_error(arguments: list[str], words: str) -> None:
    finished = command(*arguments, "--target", "127.0.0.1:1")
    assert finished.returncode == 2
    assert words in " ".join(finished.stderr.replace("│", " ").split())
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("tenant", ["acme corp", "*", "a" * 65, 5, None])
@pytest.mark.parametrize(
    ("method", "arguments"),
    [("evict", [[b"x"]]), ("pin", [[b"x"]]), ("prewarm", [[b"x"]]), ("describe", [[b"x"]]), ("evict_tenant", [])],
)
def test_the_clients_send_no_name_that_no_tenant_can_have(
    call: Calls, method: str, arguments: list[Any], tenant: Any
) -> None:
    with pytest.raises(InvalidParameterError, match="tenant: no tenant can have"):
        call("127.0.0.1:1", "token", method, *arguments, tenant=tenant)


def test_without_any_target_the_command_names_the_remedy(tmp_path: pathlib.Path) -> None:
    finished = command("0" * 64, XDG_RUNTIME_DIR=str(tmp_path))
    assert finished.returncode == 2
    assert "admin_listen" in finished.stderr


def test_a_cache_that_refuses_the_command_is_not_worth_another_call(call: Calls) -> None:
    with EmbeddedRedis() as server:
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("ACL", "SETUSER", "narrow", "on", ">pw", "~*", "&*", "+@all", "-scan", "-persist")
        url = f"unix://narrow:pw@{server.url.removeprefix('unix://')}"
        with InProcessStack(DEMO_MODEL, redis=url, num_decoders=0, encoder_arguments=ONE_THREAD) as stack:
            (target,) = stack.admin_targets
            for method, *arguments in (("evict", [b"x"]), ("pin", [b"x"]), ("stats",)):
                with pytest.raises(CacheAccessError, match="lookonce-janitor"):
                    call(target, None, method, *arguments)
