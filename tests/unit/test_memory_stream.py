from __future__ import annotations

import pytest
import torch

from spectrain.protocol.schedule import Op
from spectrain.worker.boundary import Parcel
from spectrain.worker.memory_stream import memory_pair


def parcel(op: str) -> Parcel:
    return Parcel(Op.parse(op), torch.full((2,), float(op[1:])), 2, 4)


def test_parcels_are_taken_by_op_in_any_order_and_once() -> None:
    outbox, inbox = memory_pair()
    outbox.put(parcel("F0"))
    outbox.put(parcel("F1"))
    assert inbox.take(Op.parse("F1")).value.tolist() == [1, 1]
    assert not inbox.ready(Op.parse("F1"))
    assert inbox.ready(Op.parse("F0"))
    assert inbox.take(Op.parse("F0")).samples == 2


def test_the_receiver_has_memory_of_its_own() -> None:
    outbox, inbox = memory_pair()
    sent = parcel("F3")
    outbox.put(sent)
    sent.value.zero_()
    assert inbox.take(Op.parse("F3")).value.tolist() == [3, 3]


def test_a_parcel_that_will_never_come_is_said_at_once() -> None:
    outbox, inbox = memory_pair()
    outbox.put(parcel("F0"))
    with pytest.raises(AssertionError, match=r"F1 is not there; here are \['F0'\]"):
        inbox.take(Op.parse("F1"))


def test_an_op_is_sent_once() -> None:
    outbox, _ = memory_pair()
    outbox.put(parcel("F0"))
    with pytest.raises(AssertionError, match="F0 was sent twice"):
        outbox.put(parcel("F0"))


def test_parcels_are_numbered_as_on_a_wire() -> None:
    outbox, inbox = memory_pair()
    outbox.put(parcel("F0"))
    outbox.put(parcel("F1"))
    assert outbox.number == 2
    assert [inbox.take(Op.parse(text)).number for text in ("F0", "F1")] == [0, 1]


def test_a_parcel_that_is_made_again_keeps_its_number() -> None:
    outbox, inbox = memory_pair()
    outbox.put(parcel("F5"), 5)
    assert outbox.number == 0
    assert inbox.take(Op.parse("F5")).number == 5
