"""The inbox keeps the order of messages, and stays small however many images are to be forgotten."""

from __future__ import annotations

from decoder_svc.engine.messages import Abort, Inbox, Stop
from decoder_svc.scheduling.request import RequestId
from decoder_svc.scheduling.request_output import FinishReason
from lookonce.forgotten import EVERYTHING, Forgotten

A, B = (Abort(RequestId(name), FinishReason.ABORT) for name in "ab")


def test_messages_come_in_the_order_in_which_they_were_put() -> None:
    inbox = Inbox()
    for message in (A, B, Stop()):
        inbox.put(message)
    assert [inbox.take(None) for _ in range(3)] == [A, B, Stop()]
    assert inbox.take(0) is None


def test_all_images_to_forget_that_wait_are_one_message() -> None:
    inbox = Inbox()
    inbox.put_forgotten(Forgotten(frozenset([b"x"])))
    inbox.put(A)
    inbox.put_forgotten(Forgotten(frozenset([b"y"])))
    assert inbox.take(0) == Forgotten(frozenset([b"x", b"y"]))
    assert inbox.take(0) == A
    assert inbox.take(0) is None


def test_images_to_forget_after_a_take_are_a_new_message() -> None:
    inbox = Inbox()
    inbox.put_forgotten(Forgotten(frozenset([b"x"])))
    assert inbox.take(0) == Forgotten(frozenset([b"x"]))
    inbox.put_forgotten(EVERYTHING)
    assert inbox.take(0) == EVERYTHING
    assert inbox.take(0) is None
