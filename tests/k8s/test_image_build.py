"""Images that are built from the Dockerfile serve as pods run them: no rights, nothing written, nothing compiled."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from lookonce.client import Client
from lookonce.local.redis_server import EmbeddedRedis
from lookonce.local.reserved_port import reserved_port
from tests.e2e.pictures import QUESTION, fresh
from tests.k8s.image_container import Container, Image, kernels, skip_without_a_builder

# The first test builds; nobody knows how fast.
pytestmark = [pytest.mark.image, pytest.mark.timeout(7200)]
_START_TIMEOUT_S = 300.0
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class System:
    """Both images, and a container of each; both use one cache."""

    encoder_image: Image
    encoder: Container
    decoder: Container
    decoder_target: str

    @property
    def containers(self) -> tuple[Container, Container]:
        """The encoder's and the decoder's container."""
        return self.encoder, self.decoder


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    base = skip_without_a_builder()
    images = [Image.build(target, base) for target in ("encoder", "decoder")]
    folder = tmp_path_factory.mktemp("containers")
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis(use_tcp=True))
        targets = [f"127.0.0.1:{stack.enter_context(reserved_port())}" for _ in images]
        more = [{}, {"LOOKONCE_ENCODER_TARGET": targets[0], "LOOKONCE_KV_CACHE_MEMORY_SHARE": "0.1"}]
        containers = []
        for image, target, variables in zip(images, targets, more, strict=True):
            container = image.run(folder, **environment(target), LOOKONCE_REDIS_URL=redis.url, **variables)
            containers.append(stack.enter_context(container))
            wait_until_healthy(containers[-1])
        yield System(images[0], containers[0], containers[1], targets[1])


def environment(target: str) -> dict[str, str]:
    return {"LOOKONCE_LISTEN": target, "LOOKONCE_METRICS_LISTEN": "127.0.0.1:0", "LOOKONCE_NUM_THREADS": "1"}


def wait_until_healthy(container: Container) -> None:
    """By the image's own health check."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        assert container.returncode is None, container.log
        # Its process is there when the starter has made it, a moment later.
        if container.log and container.check_health().returncode == 0:
            return
        assert time.monotonic() < deadline, container.log
        time.sleep(_POLL_S)


def test_the_health_check_of_each_image_says_serving(system: System) -> None:
    assert [one.check_health().stderr.strip() for one in system.containers] == ["SERVING", "SERVING"]


def test_all_processes_are_of_one_user_without_rights(system: System) -> None:
    for container in system.containers:
        for process in container.processes:
            lines = pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines()
            status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
            assert status["Uid"] == status["Gid"] == ["10001"] * 4
            assert status["Groups"] == []
            assert status["NoNewPrivs"] == ["1"]
            assert {
                name: int(value[0], 16) for name, value in status.items() if name.startswith("Cap")
            } == dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), 0)


@pytest.mark.parametrize("folder", ["/", "/opt/lookonce", "/var/cache/lookonce/lookonce"])
def test_not_even_root_can_write(system: System, folder: str) -> None:
    for container in system.containers:
        finished = container.execute(["touch", f"{folder}/new"], as_root=True)
        assert (finished.returncode, "Read-only file system" in finished.stderr) == (1, True), finished.stderr


def test_memory_at_tmp_can_be_written(system: System) -> None:
    for container in system.containers:
        assert container.execute(["touch", "new"]).returncode == 0
        assert container.execute(["test", "-e", "/tmp/new"]).returncode == 0


def test_kernels_are_those_of_the_image(system: System) -> None:
    for container in system.containers:
        in_image = container.execute(["sh", "-c", "ls /var/cache/lookonce/lookonce/*.so"]).stdout.split()
        loaded = kernels(container)
        assert loaded
        assert loaded <= set(in_image)


def test_a_question_about_a_picture_is_answered(system: System) -> None:
    (picture,) = fresh(1)
    with Client.connect(system.decoder_target) as client:
        generation, again = (client.generate(QUESTION, images=[picture.data], max_tokens=16) for _ in range(2))
    assert generation.text == again.text == picture.answer
    assert generation.usage.encoded_image_tokens == generation.usage.image_tokens > 0
    assert again.usage.encoded_image_tokens == 0


def test_an_encoder_without_a_cache_is_healthy_and_ends_in_order(system: System, tmp_path: pathlib.Path) -> None:
    with reserved_port() as port, system.encoder_image.run(tmp_path, **environment(f"127.0.0.1:{port}")) as container:
        wait_until_healthy(container)
        assert container.terminate() == 0, container.log
