"""`lookonce encode` walks folders, uploads what is not cached, and goes on after an interruption."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib

import pytest

from lookonce.commands.prewarming import EncodeOptions, prewarm
from lookonce.errors import ImageUndecodableError, InvalidParameterError, UnavailableError
from lookonce.images import ImageRef
from lookonce.testing import FakeServer
from tests.lookonce.command import clean_environment, run_here
from tests.lookonce.commands.conftest import Command
from tests.lookonce.commands.terminal import Terminal
from tests.lookonce.sdk.sdk_servers import System, running_system


def rows_of(shown: str) -> list[list[str]]:
    titles, *rows = [line.split("\t") for line in shown.splitlines()]
    assert titles == ["image", "digest", "rows", "source", "model time"]
    return sorted(rows)


def test_a_folder_is_encoded_once_and_the_second_run_uploads_nothing(
    command: Command, server: FakeServer, pictures: pathlib.Path
) -> None:
    # A file that is named beside its folder is one file.
    first = command("encode", str(pictures), str(pictures / "2.png"))
    assert first.returncode == 0, first.stderr
    paths = sorted(str(pictures / name) for name in ("2.png", "10.png", "more/a.png"))
    assert [row[0] for row in rows_of(first.stdout)] == paths
    assert [row[1:4] for row in rows_of(first.stdout)] == [
        [ImageRef.from_file(path).hex, "16", "computed"] for path in paths
    ]
    assert f"skipped {pictures}/notes.txt: no image" in first.stderr
    assert "3 images: 3 encoded in" in first.stderr
    assert len(server.images.uploads) == 3
    second = command("encode", str(pictures))
    assert [row[3] for row in rows_of(second.stdout)] == ["cache"] * 3
    assert "3 images: 3 cached already in" in second.stderr
    assert len(server.images.uploads) == 3


def test_a_folder_without_images_is_no_error(command: Command, tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty").mkdir()
    finished = command("encode", str(tmp_path / "empty"))
    assert finished.returncode == 0
    assert "0 images in" in finished.stderr


def test_an_unreachable_server_ends_the_run_at_once(
    environment: dict[str, str], pictures: pathlib.Path, server: FakeServer
) -> None:
    server.close()
    finished = run_here(environment, "encode", str(pictures), "--timeout-s", "5")
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[-1].startswith("error: ")
    assert "failed" not in finished.stderr


async def encoded(system: System, *arguments: str, folder: pathlib.Path) -> tuple[int, str, str]:
    environment = clean_environment(folder) | {"LOOKONCE_TARGET": system.decoder_target}
    finished = await asyncio.to_thread(run_here, environment, "encode", *arguments)
    return finished.returncode, finished.stdout, finished.stderr


async def test_an_image_that_is_refused_does_not_keep_the_others_out(pictures: pathlib.Path) -> None:
    refused = ImageRef.from_file(pictures / "10.png").digest
    async with running_system() as system:
        resolve = system.knowledge.resolve

        def refusing(images: list[object], **options: bool) -> list[bytes]:
            if any(image.expected_digest == refused for image in images):  # type: ignore[attr-defined]
                raise ImageUndecodableError("this one is broken")
            return resolve(images, **options)  # type: ignore[arg-type]

        system.knowledge.resolve = refusing  # type: ignore[method-assign, assignment]
        status, shown, said = await encoded(system, str(pictures), "--parallel", "2", folder=pictures)
    assert status == 1
    assert [row[0] for row in rows_of(shown)] == sorted([str(pictures / "2.png"), str(pictures / "more/a.png")])
    assert f"failed {pictures}/10.png: this one is broken" in said
    assert "1 failed" in said


async def test_options_of_images_reach_the_encoder(pictures: pathlib.Path) -> None:
    async with running_system() as system:
        assert (await encoded(system, str(pictures), "--max-pixels", "77", folder=pictures))[0] == 0
        assert {max_pixels for _, max_pixels, _ in system.knowledge.cached} == {77}


def test_files_are_read_while_calls_run_and_never_all_at_once(tmp_path: pathlib.Path) -> None:
    """A stand-in for the client counts the images of the calls that run at the same time."""
    paths = [tmp_path / f"{number}" for number in range(200)]
    for path in paths:
        path.write_bytes(path.name.encode())

    class Counting:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def lookup(self, images: list[ImageRef], *, timeout_s: float) -> list[bool]:
            return []

        def encode(self, images: list[ImageRef], *, timeout_s: float) -> list[ImageRef]:
            self.sizes.append(len(images))
            if self.sizes[2:]:
                raise UnavailableError("away")
            return images

    client = Counting()
    with pytest.raises(UnavailableError):
        list(prewarm(client, paths, EncodeOptions(None, False, 5.0), 1))  # type: ignore[arg-type]
    assert client.sizes[:2] == [32, 32]
    assert len(client.sizes) < 6, "after such an error no further calls begin"


def test_an_option_that_the_model_lacks_is_one_error_with_its_flag(tmp_path: pathlib.Path) -> None:
    """A stand-in for the client refuses as an encoder does."""
    paths = [tmp_path / f"{number}" for number in range(3)]
    for path in paths:
        path.write_bytes(path.name.encode())
    refusal = InvalidParameterError("items[0].image.max_pixels", "this model has no such option")
    refusal.request_id = "a1"

    class Refusing:
        def lookup(self, images: list[ImageRef], *, timeout_s: float) -> list[bool]:
            return []

        def encode(self, images: list[ImageRef], *, timeout_s: float) -> list[ImageRef]:
            raise refusal

    with pytest.raises(InvalidParameterError) as caught:
        list(prewarm(Refusing(), paths, EncodeOptions(9, False, 5.0), 1))  # type: ignore[arg-type]
    assert caught.value.message == "--max-pixels: this model has no such option"
    assert caught.value.request_id == "a1", "a server was asked, so that the exit status is 1"


async def test_such_a_refusal_of_a_server_is_no_wrong_command_line(pictures: pathlib.Path) -> None:
    async with running_system() as system:
        status, shown, said = await encoded(system, str(pictures), "--beside-others", folder=pictures)
    assert (status, len(shown.splitlines())) == (1, 1)
    assert said.splitlines()[-1] == "error: --beside-others: makes no difference here"


def test_names_of_files_lose_their_control_characters(
    environment: dict[str, str], pictures: pathlib.Path, server: FakeServer
) -> None:
    folder = pictures / "more"
    (folder / "a.png").rename(folder / "red\x1b[31m\x9b.png")
    (folder / "new\nline\x07.txt").write_text("no picture")
    with contextlib.closing(Terminal(environment, "encode", str(folder), term="xterm")) as terminal:
        for shown in ("new\\nline\N{REPLACEMENT CHARACTER}.txt: no image", "red\N{REPLACEMENT CHARACTER}[31m"):
            terminal.until(shown)
        assert terminal.process.wait(60) == 0


def test_on_a_terminal_a_table_follows_the_progress(environment: dict[str, str], pictures: pathlib.Path) -> None:
    digest = ImageRef.from_file(pictures / "2.png").hex
    with contextlib.closing(Terminal(environment, "encode", str(pictures / "2.png"), term="xterm")) as terminal:
        for shown in ("encoding", f" {digest[:16]} ", "computed", "1 image: 1 encoded in"):
            terminal.until(shown)
        assert terminal.process.wait(60) == 0
