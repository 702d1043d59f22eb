"""Copies to the device: in order for a step's numbers, on a stream of their own for embedding rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from decoder_svc.runner.host_transfer import HostTransfer, PinnedTransfer
from tests.decoder_svc.runner.cuda.fake_cuda import FakeStream, installed
from tests.decoder_svc.runner.cuda.simulated_device import CUDA, PINNED, RESULT, RETURN, DeviceTensor

CPU = torch.device("cpu")


@pytest.fixture
def cuda() -> Iterator[None]:
    with installed():
        yield


def test_the_plain_transfer_copies_nothing_where_the_device_reads_host_memory() -> None:
    transfer, host = HostTransfer(CPU), torch.arange(3)
    with transfer.overlapping_steps():
        moved = transfer.move(host)
    transfer.mark_used_by_steps(moved)
    transfer.wait_for_overlapping()
    assert moved.data_ptr() == host.data_ptr()


@pytest.mark.usefixtures("cuda")
def test_rows_are_moved_on_their_own_stream_for_which_steps_wait() -> None:
    transfer = PinnedTransfer(CUDA)
    with transfer.overlapping_steps():
        assert FakeStream.current is not FakeStream.steps
        moved = transfer.move(torch.arange(3))
    assert FakeStream.current is FakeStream.steps
    assert moved.tolist() == [0, 1, 2]
    assert FakeStream.steps.num_waits == 0, "nothing waits before a step needs the rows"
    transfer.wait_for_overlapping()
    assert FakeStream.steps.num_waits == 1


@pytest.mark.usefixtures("cuda")
def test_memory_of_rows_is_kept_until_the_steps_stream_has_read_it() -> None:
    transfer = PinnedTransfer(CUDA)
    with transfer.overlapping_steps():
        moved = transfer.move(torch.arange(3))
    transfer.mark_used_by_steps(moved)
    assert FakeStream.steps.recorded == {moved.data_ptr()}


def test_gathered_tensors_reach_the_device_in_one_copy() -> None:
    hosts = [
        torch.arange(5),
        torch.zeros(0, dtype=torch.int32),
        torch.tensor([[1.5, 2.5]]),
        torch.tensor(7).expand(2, 3),
    ]
    with installed() as cuda:
        transfer = PinnedTransfer(CUDA)
        with cuda.device.noting() as events, transfer.gathered() as move:
            moved = [move(host) for host in hosts]
        assert [event.kind for event in events] == [PINNED]
        for host, tensor in zip(hosts, moved, strict=True):
            assert isinstance(tensor, DeviceTensor)
            assert tensor.dtype == host.dtype
            assert tensor.tolist() == host.tolist()


def test_a_step_too_large_for_the_buffer_makes_the_next_one_larger() -> None:
    large, small = torch.arange(20_000), torch.arange(3)
    with installed() as cuda:
        transfer = PinnedTransfer(CUDA)
        for num_copies in (2, 1):
            with cuda.device.noting() as events, transfer.gathered() as move:
                moved = [move(small), move(large)]
            assert [event.kind for event in events] == [PINNED] * num_copies
            assert [each.tolist() for each in moved] == [small.tolist(), large.tolist()]


def test_numbers_that_the_host_has_are_fetched_at_once() -> None:
    assert HostTransfer(CPU).fetch(torch.arange(3))().tolist() == [0, 1, 2]


def test_a_fetch_does_not_wait_until_its_result_is_asked_for() -> None:
    with installed() as cuda:
        transfer = PinnedTransfer(CUDA)
        values = torch.arange(3).to(CUDA)
        with cuda.device.noting() as events:
            result = transfer.fetch(values)
        assert [event.kind for event in events] == [RETURN]
        # Work that is submitted later may overwrite the values.
        values.fill_(9)
        with cuda.device.noting() as events:
            assert result().tolist() == [0, 1, 2]
        assert [event.kind for event in events] == [RESULT]
