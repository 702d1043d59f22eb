"""Tests that frames come out as they went in, however the socket cuts them."""

from __future__ import annotations

import random
import socket
import threading

import msgspec
import pytest

from decoder_svc.constraint.frames import Followed, Forced, FrameReader, encoded


def wait_s() -> float:
    return 5.0


@pytest.mark.parametrize("seed", range(10))
def test_frames_of_any_size_in_any_pieces(seed: int) -> None:
    rng = random.Random(seed)
    frames: list[Forced | Followed] = []
    for number in range(60):
        size = rng.choice([0, 3, 6144, 300_000])
        forced = Forced(None, rng.choices(range(100_000), k=number))
        followed = Followed("why", [number], {number: rng.randbytes(size)})
        frames.append(forced if rng.random() < 0.5 else followed)
    data = b"".join(encoded(frame) for frame in frames)
    ours, theirs = socket.socketpair()

    def send() -> None:
        start = 0
        while start < len(data):
            stop = start + rng.choice([1, 5, 4096, 1 << 20])
            theirs.sendall(data[start:stop])
            start = stop

    with ours, theirs:
        thread = threading.Thread(target=send)
        thread.start()
        reader = FrameReader(ours)
        assert [reader.next(type(frame), wait_s) for frame in frames] == frames
        thread.join()


def never() -> float:
    raise TimeoutError


def test_a_wrong_frame_a_late_one_and_the_end_of_the_other_side_are_told() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = FrameReader(ours)
        theirs.sendall(encoded(Forced(None, [1])))
        with pytest.raises(msgspec.DecodeError):
            reader.next(Followed, wait_s)
        with pytest.raises(TimeoutError):
            reader.next(Forced, never)
        theirs.sendall(encoded(Forced(None, [2])) + encoded(Forced(None, [3]))[:-1])
        theirs.close()
        assert reader.next(Forced, wait_s) == Forced(None, [2])
        with pytest.raises(EOFError):
            reader.next(Forced, wait_s)
