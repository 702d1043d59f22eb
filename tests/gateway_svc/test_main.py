"""`python -m gateway_svc` as operators run it: it starts, serves and drains, or refuses to start with the reason."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import pytest
import trustme

from lookonce.testing import FakeRequest, FakeServer


@contextmanager
def started(folder: pathlib.Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The running process and the content of its ready file."""
    ready_file = folder / "ready.json"
    command = [sys.executable, "-m", "gateway_svc", "--listen", "127.0.0.1:0", "--ready-file", str(ready_file)]
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        while not ready_file.exists():
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.02)
        yield process, json.loads(ready_file.read_text())
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_it_finishes_answers_on_sigterm_and_exits_with_0(tmp_path: pathlib.Path) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def answer(request: FakeRequest) -> str:
        begun.set()
        may_end.wait(60)
        return "a red square"

    with FakeServer(answer) as server, started(tmp_path, "--decoder-target", server.target) as (process, ready):
        client = openai.OpenAI(base_url=f"http://{ready['target']}/v1", api_key="secret", max_retries=0)
        answers: list[str | None] = []

        def ask() -> None:
            completion = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hello"}])
            answers.append(completion.choices[0].message.content)

        asking = threading.Thread(target=ask)
        asking.start()
        assert begun.wait(60)
        process.send_signal(signal.SIGTERM)
        while (tmp_path / "ready.json").exists():
            time.sleep(0.02)
        may_end.set()
        asking.join()
        assert answers == ["a red square"]
        assert process.wait(60) == 0
        assert process.stderr is not None
        log = process.stderr.read()
        events = [json.loads(line) for line in log.splitlines()]
        assert [one["event"] for one in events] == ["listening", "draining", "request", "stopped"]
        assert "secret" not in log
        assert "hello" not in log
        client.close()


def test_it_serves_over_tls(tmp_path: pathlib.Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    files = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    with FakeServer() as server, started(tmp_path, "--decoder-target", server.target, *files) as (_, ready):
        import ssl

        import httpx

        context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        port = ready["target"].rpartition(":")[2]
        with httpx.Client(verify=context) as client:
            assert client.get(f"https://localhost:{port}/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "--decoder-target: is not set"),
        (("--decoder-target", "http://x"), "--decoder-target: "),
        (("--decoder-target", "127.0.0.1:1", "--listen", "0.0.0.0:0"), "would serve plaintext"),
        (("--decoder-target", "127.0.0.1:1", "--tls-cert", "x.pem"), "belong together"),
        (("--decoder-target", "127.0.0.1:1", "--tls-cert", "x.pem", "--tls-key", "x.pem"), "--tls-cert, --tls-key: "),
        (("--decoder-target", "127.0.0.1:1", "--decoder-tls-ca", "missing.pem"), "missing.pem"),
        (("--decoder-target", "127.0.0.1:1", "--image-hosts", "http://x/"), "is no host"),
        (("--decoder-target", "127.0.0.1:1", "--private-image-hosts", "*"), "name each private host"),
        (("--decoder-target", "127.0.0.1:1", "--max-body-bytes", "2000", "--max-buffered-bytes", "1500"), "at least"),
        (("--decoder-targets", "127.0.0.1:1"), "there is no flag --decoder-targets; did you mean --decoder-target?"),
    ],
)
def test_it_refuses_to_start_with_the_reason(arguments: Sequence[str], reason: str) -> None:
    command = [sys.executable, "-m", "gateway_svc", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert reason in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_taken_port_is_named() -> None:
    with FakeServer() as server:
        command = [sys.executable, "-m", "gateway_svc", "--decoder-target", server.target, "--listen", server.target]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 2
    assert f"cannot listen on {server_address(ended.stderr)}" in ended.stderr


def server_address(text: str) -> str:
    return text.partition("cannot listen on ")[2].partition(":")[0] + ":"


def test_it_needs_none_of_the_services_packages() -> None:
    code = (
        "import sys, gateway_svc.__main__, gateway_svc.app, gateway_svc.serving; "
        "print(sorted({'torch', 'transformers', 'numpy', 'PIL', 'redis', 'cryptography', 'jwt'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
