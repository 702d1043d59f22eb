"""Wrong command lines end with status 2 and one clear error, before anything is sent or started."""

from __future__ import annotations

import io
import os
import pathlib
import sys

import pytest

from lookonce import cli

DIGEST = "0" * 64
NOBODY = ("--target", "127.0.0.1:1", "--timeout-s", "2")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """An empty environment, and a folder with a picture, a text and a folder."""
    for name in [name for name in os.environ if name.startswith("LOOKONCE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large.txt").write_bytes(b" " * (1 << 20) + b" ")


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs the command in this process and returns its error in one line."""
    monkeypatch.setattr(sys, "argv", ["lookonce", *arguments])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit) as caught:
        cli.main()
    shown = capsys.readouterr()
    assert (caught.value.code, shown.out) == (2, ""), shown.err
    return " ".join(shown.err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "x", "--target", ""), "is empty"),
        (("generate", "x", "--target", " "), "is empty"),
        (("generate", "x", "--target", "127.0.0.1"), "with a port"),
        (("generate", "x", "--target", "127.0.0.1:99999"), "1..65535"),
        (("generate", "x", "--target", "http://127.0.0.1:1"), "without http://"),
        (("generate", "x", *NOBODY[:2], "--timeout-s", "nan"), "--timeout-s"),
        (("generate", "x", *NOBODY[:2], "--timeout-s", "0"), "--timeout-s"),
        (("generate", "x", *NOBODY, "--temperature", "nan"), "--temperature"),
        (("generate", "x", *NOBODY, "--temperature", "-1"), "--temperature"),
        (("generate", "x", *NOBODY, "--seed", str(2**64)), "--seed"),
        (("generate", "x", *NOBODY, "--max-tokens", str(2**32)), "--max-tokens"),
        (("generate", "x", *NOBODY, "-i", "folder"), "folder is a folder"),
        (("generate", "x", *NOBODY, "-i", "none.png"), "neither a file nor a SHA-256 digest"),
        (("generate", "x", *NOBODY, "--video", "text.txt"), "is a file"),
        (("generate", "x", *NOBODY, "--video", "folder"), "at least 2"),
        (("generate", "x", *NOBODY, "--logprobs", "2"), "needs --json"),
        (("generate", "x", *NOBODY, "--raw", "--system", "y"), "neither --video nor --system"),
        (("generate", "x", *NOBODY, "--logit-bias", "7"), "is not TOKEN_ID=VALUE"),
        (("generate", "x", *NOBODY, "--top-p", "1.5"), "--top-p"),
        (("generate", "x", *NOBODY, "--grammar", "@none.txt"), "none.txt"),
        (("generate", "-", *NOBODY), "standard input is empty"),
        (("generate", "\udcff", *NOBODY), "no text in UTF-8"),
        (("generate", "x", *NOBODY, "--system", "\udcff"), "no text in UTF-8"),
        (("generate", "x", *NOBODY, "--stop", "\udcff"), "stop"),
        (("generate", "x", *NOBODY, "--adapter", ""), "is empty"),
        (("generate", "x", *NOBODY, "--request-id", ""), "is empty"),
        (("generate", "x", *NOBODY, "--request-id", "a b"), "request_id"),
        (("generate", "x", *NOBODY, "--video", ""), "is empty"),
        (("generate", "x", *NOBODY, "--logit-bias=-1=1"), "no token with a value"),
        (("generate", "x", *NOBODY, "--logit-bias=1=nan"), "no token with a value"),
        (("generate", "x", *NOBODY, "--stop-token-id", str(2**32)), "--stop-token-id"),
        (("generate", "x", *NOBODY, "--regex", "@pipe"), "pipe is neither a file nor a folder"),
        (("generate", "x", *NOBODY, "--regex", "@/dev/zero"), "/dev/zero is neither a file nor a folder"),
        (("generate", "x", *NOBODY, "--regex", "@large.txt"), "more than 1 MiB"),
        (("bench", "\udcff", *NOBODY), "no text in UTF-8"),
        (("bench", *NOBODY, "--pictures", "/dev/zero"), "is neither a file nor a folder"),
        (("bench", *NOBODY, "--json", "folder"), "name a file"),
        (("bench", *NOBODY, "--plot", ""), "name a file"),
        (("encode", "", *NOBODY), "is empty"),
        (("encode", "pipe", *NOBODY), "pipe is neither a file nor a folder"),
        (("encode", "/dev/zero", *NOBODY), "is neither a file nor a folder"),
        (("lookup", "", *NOBODY), "is empty"),
        (("lookup", "pipe", *NOBODY), "pipe is neither a file nor a folder"),
        (("lookup", "folder", *NOBODY), "folder is a folder"),
        (("cache", "pin", "", *NOBODY), "'' is neither a file"),
        (("top", "--interval-s", "1e12"), "--interval-s"),
        (("config", "show", "gateway", "--json", "--k8s"), "each is a form of the output"),
        (("chat", *NOBODY, "-i", "none.png"), "neither a file nor a SHA-256 digest"),
        (("lookup", "none.png", *NOBODY), "does not exist"),
        (("encode", *NOBODY), "Missing argument"),
        (("cache", "evict", DIGEST, "--target", ""), "is empty"),
        (("cache", "evict", DIGEST, "--tenant", "", *NOBODY), "is empty"),
        (("cache", "evict", "--all-of-tenant", "--tenant", "", *NOBODY), "is empty"),
        (("cache", "evict", "", *NOBODY), "'' is neither a file nor a SHA-256 digest"),
        (("cache", "evict", "0x" + DIGEST[2:], *NOBODY), "is neither a file nor a SHA-256 digest"),
        (("cache", "evict", "folder", *NOBODY), "is a folder"),
        (("cache", "pin", *NOBODY), "Missing argument"),
        (("cache", "unpin", "none.png", *NOBODY), "is neither a file nor a SHA-256 digest"),
        (("encode", "folder", "--parallel", "0", *NOBODY), "--parallel"),
        (("up", "--model", ""), "is empty"),
        (("up", "--model", "folder"), "config.json"),
        (("up", "--redis-url", ""), "is empty"),
        (("up", "--port", "70000"), "--port"),
        (("up", "--device", ""), "is empty"),
        (("up", "--device", "abacus"), "no device abacus"),
        (("up", "--dtype", "float8"), "'float8' is not one of auto, float32"),
        (("up", "--decoders", "65"), "--decoders"),
        (("up", "--encoders", "65"), "--encoders"),
        (("up", "--", "--max-num-seq", "8"), "did you mean --max-num-seqs?"),
        (("up", "extra"), "'extra' is no flag"),
        (("doctor", "--model", ""), "is empty"),
        (("token", ""), "name must match"),
        (("token", "a", "--tenant", "x y"), "tenant must match"),
        (("serve", "decoder", "--model", ""), "'' is neither a folder nor a name on the hub"),
        (("nothing",), "No such command"),
    ],
)
def test_a_wrong_argument_is_refused(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(monkeypatch, capsys, *arguments)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("LOOKONCE_TARGET", "", "no running server found"),
        ("LOOKONCE_TARGET", "decoder", "with a port"),
        ("LOOKONCE_TLS_CA", "", "LOOKONCE_TLS_CA is empty"),
        ("LOOKONCE_TLS_CA", "text.txt", "text.txt is no PEM file"),
        ("LOOKONCE_TLS_CA", "folder", "cannot read folder"),
        ("LOOKONCE_TLS_CERT", "text.txt", "belong together"),
        ("LOOKONCE_TOKEN", "a\nb", "the token must be"),
        ("LOOKONCE_TOKEN", "ä", "the token must be"),
    ],
)
def test_a_wrong_variable_is_refused(
    variable: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    target = () if variable == "LOOKONCE_TARGET" else NOBODY
    assert words in refused(monkeypatch, capsys, "generate", "x", *target)
