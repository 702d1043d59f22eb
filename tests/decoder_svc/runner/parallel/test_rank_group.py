"""The ranks get from one another what each of them should have. Each rank is a thread here."""

from __future__ import annotations

import os
import pathlib
import socket
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest
import torch

from decoder_svc.runner.parallel.gloo_engine import GlooEngine
from decoder_svc.runner.parallel.meeting_store import MeetingStore
from decoder_svc.runner.parallel.rank_group import RankGroup

ResultT = TypeVar("ResultT")
SIZE = 3
TIMEOUT_S = 60
# Widths that the number of ranks divides, and does not; one has less than an element for each.
WIDTHS = (6, 7, 8, 2)


class Ranks:
    """Three ranks that do the same at the same time."""

    def __init__(self, address: str | None) -> None:
        self._threads = ThreadPoolExecutor(SIZE)
        store = MeetingStore()
        self.groups = self._together(lambda rank: RankGroup(rank, SIZE, store, GlooEngine(), address))

    def do(self, step: Callable[[RankGroup], ResultT]) -> list[ResultT]:
        return self._together(lambda rank: step(self.groups[rank]))

    def _together(self, step: Callable[[int], ResultT]) -> list[ResultT]:
        calls = [self._threads.submit(step, rank) for rank in range(SIZE)]
        return [call.result(TIMEOUT_S) for call in calls]


@pytest.fixture(scope="module", params=[None, "127.0.0.1"], ids=["one machine", "several"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return Ranks(request.param)


def parts(seed: int, *shape: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(np.float32) for _ in range(SIZE)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_equal_on_all_ranks_and_rounded_once(ranks: Ranks, dtype: torch.dtype) -> None:
    each = [torch.from_numpy(part).to(dtype) for part in parts(1, 5, 40)]
    sums = ranks.do(lambda group: group.sum(each[group.rank].clone()))
    assert all(torch.equal(one, sums[0]) for one in sums)
    assert sums[0].dtype is dtype
    exact = sum(one.double() for one in each)
    assert isinstance(exact, torch.Tensor)
    assert float((sums[0].double() - exact).abs().max()) <= float(torch.finfo(dtype).eps) * 8


@pytest.mark.parametrize("width", WIDTHS)
def test_shares_are_joined_in_the_order_of_the_ranks(ranks: Ranks, width: int) -> None:
    whole = torch.arange(4 * width, dtype=torch.float32).reshape(4, width)
    taken = ranks.do(lambda group: group.share(width))
    assert [index for share in taken for index in range(width)[share]] == list(range(width))
    joined = ranks.do(lambda group: group.join(whole[:, group.share(width)], width))
    assert all(torch.equal(one, whole) for one in joined)
    first, *others = ranks.do(lambda group: group.join_at_first(whole[:, group.share(width)], width))
    assert torch.equal(first, whole)
    assert all(one.shape == whole.shape for one in others)


def test_the_tensors_of_rank_0_are_sent_to_the_others(ranks: Ranks) -> None:
    sent = [torch.tensor([True, False, True]), torch.arange(6).reshape(2, 3), torch.tensor([1.5], dtype=torch.bfloat16)]

    def step(group: RankGroup) -> list[torch.Tensor]:
        own = [one.clone() if group.rank == 0 else torch.zeros_like(one) for one in sent]
        group.send_from_first(own)
        return own

    for received in ranks.do(step):
        assert all(torch.equal(one, other) for one, other in zip(received, sent, strict=True))


def test_connections_between_machines_are_probed() -> None:
    before = set(tcp_sockets())
    kept = Ranks("127.0.0.1")
    found = {number: probes for number, probes in tcp_sockets().items() if number not in before}
    # Each of the three pairs of ranks has a connection, both ends of which are in this process.
    assert len(found) >= 6
    assert set(found.values()) == {(1, 10, 5, 3, 25_000)}
    del kept


def tcp_sockets() -> dict[int, tuple[int, ...]]:
    """Returns the options of the connected TCP sockets of this process, by the inode of each."""
    found = {}
    for file in pathlib.Path("/proc/self/fd").iterdir():
        try:
            number = os.dup(int(file.name))
        except OSError:
            continue
        if not stat.S_ISSOCK((facts := os.fstat(number)).st_mode):
            os.close(number)
            continue
        with socket.socket(fileno=number) as sock:
            if sock.family == socket.AF_INET and sock.type == socket.SOCK_STREAM:
                try:
                    sock.getpeername()
                except OSError:
                    continue
                options = ("KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")
                found[facts.st_ino] = (
                    sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                    *(sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}")) for name in options),
                )
    return found


@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_nobody_can_connect_to_ranks_that_have_met(address: str | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        before = listening_ports()
        kept = Ranks(address)
        assert listening_ports() == before
        assert own.getsockname()[1] in before
        with socket.create_connection(own.getsockname()):
            own.accept()[0].close()
        assert [one.tolist() for one in kept.do(lambda group: group.sum(torch.ones(1)))] == [[3.0]] * 3


def listening_ports() -> set[int]:
    """Returns the ports at which this process listens, as the system lists them."""
    own = {os.stat(file).st_ino for file in pathlib.Path("/proc/self/fd").iterdir() if file.exists()}
    rows = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and int(row[9]) in own}
