"""The first stage's inputs and the last one's targets, asked of a feed that the test plays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from links import CPU, in_background
from worker_birth import RUN_ID, worker_birth

from spectrain.coordinator.frames import to_frames
from spectrain.protocol.errors import DeadlineError
from spectrain.protocol.messages import FeedBatch, FeedRequest
from spectrain.protocol.schedule import Op, Schedule, Work, stage_ops
from spectrain.protocol.sockets import Server
from spectrain.worker.boundary import Parcel
from spectrain.worker.feed_inbox import LOOK_AHEAD, FeedInbox

LONG_S = 20.0
WORK = Work(train_batches=8, epoch_batches=4, evaluation_batches=2)
FED = ["F0", "F1", "F2", "F3", "E0.0", "E0.1", "F4", "F5", "F6", "F7", "E1.0", "E1.1"]
"""What a single stage is fed, in order."""


class Feed:
    """A feed that answers when it is told to, and the inbox that asks it."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.server = Server(self.context, run_id=bytes.fromhex(RUN_ID), ipc=folder / "data")
        self.work = WORK
        self.inbox: FeedInbox
        self.asked: list[str] = []

    def open(self, *, wait_timeout_s: float = LONG_S, part: str = "inputs") -> FeedInbox:
        self.inbox = FeedInbox(
            part,
            birth=worker_birth(data=self.server.ipc_endpoint),
            context=self.context,
            ops=lambda: stage_ops(Schedule.ASYNCHRONOUS, 0, 1, self.work),
            device=CPU,
            wait_timeout_s=wait_timeout_s,
        )
        return self.inbox

    def asks(self, count: int, part: str = "inputs") -> list[str]:
        """Return the next so many ops that are asked for."""
        while len(self.asked) < count:
            received = self.server.receive(LONG_S)
            assert received is not None, f"asked for {self.asked} only"
            assert isinstance(received.message, FeedRequest)
            assert (received.identity, received.message.part) == (f"worker/0/0/{part}", part)
            self.asked += received.message.ops
        found, self.asked = self.asked[:count], self.asked[count:]
        return found

    def is_quiet(self) -> bool:
        """Tell whether nothing has been asked for; a wait would only make it surer."""
        return not self.asked and self.server.receive(0) is None

    def answer(self, *ops: str, value: Any = None, part: str = "inputs") -> None:
        for op in ops:
            own = torch.full((2, 3), float(Op.parse(op).batch)) if value is None else value
            boundary, frames = to_frames(own, part)
            message = FeedBatch(
                part=part, op=op, samples=2, batch_samples=4, ids_digest="", boundary=boundary
            )
            assert self.server.send(f"worker/0/0/{part}", message, frames)

    def feed(self, count: int) -> list[Parcel]:
        """Answer and take so many ops in order."""
        parcels: list[Parcel] = []
        for _ in range(count):
            (op,) = self.asks(1)
            self.answer(op)
            parcel = self.inbox.take(Op.parse(op))
            assert parcel is not None
            parcels.append(parcel)
        return parcels

    def close(self) -> None:
        self.inbox.close()
        self.server.close()
        self.context.term()


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[Feed]:
    feed = Feed(tmp_path)
    feed.open()
    yield feed
    feed.close()


def test_a_few_batches_are_asked_for_ahead(feed: Feed) -> None:
    assert feed.asks(LOOK_AHEAD) == FED[:LOOK_AHEAD]
    assert feed.is_quiet()


def test_one_more_is_asked_for_with_each_that_is_taken(feed: Feed) -> None:
    assert [str(parcel.op) for parcel in feed.feed(len(FED))] == FED
    assert feed.is_quiet()


def test_only_what_a_stage_is_fed_is_asked_for(feed: Feed) -> None:
    ops = [str(op) for op in stage_ops(Schedule.ASYNCHRONOUS, 0, 1, WORK)]
    assert "B0" in ops
    assert [op for op in ops if op[0] in "FE"] == FED


def test_a_parcel_holds_what_the_feed_sent(feed: Feed) -> None:
    feed.asks(LOOK_AHEAD)
    feed.answer("F1")
    parcel = feed.inbox.take(Op.parse("F1"))
    assert parcel is not None
    assert (parcel.samples, parcel.batch_samples, parcel.number) == (2, 4, -1)
    assert isinstance(parcel.value, torch.Tensor)
    assert torch.equal(parcel.value, torch.ones(2, 3))


def test_values_of_every_form_arrive_in_memory_of_their_own(feed: Feed) -> None:
    value = {
        "x": torch.randn(2, 3), "none": None, "empty": torch.zeros(0, 4, dtype=torch.int64),
        "half": torch.ones(3, dtype=torch.bfloat16), "mask": torch.tensor([True, False]),
    }  # fmt: skip
    feed.asks(LOOK_AHEAD)
    feed.answer("F0", value=value)
    parcel = feed.inbox.take(Op.parse("F0"))
    assert parcel is not None
    found = parcel.value
    assert isinstance(found, dict)
    assert list(found) == list(value)
    for name, tensor in value.items():
        other = found[name]
        if tensor is None:
            assert other is None
            continue
        assert other is not None
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(other, tensor)
        other.fill_(1)  # writable, and nobody else's


def test_targets_are_asked_for_under_their_own_name(tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    feed.open(part="targets")
    assert feed.asks(LOOK_AHEAD, part="targets") == FED[:LOOK_AHEAD]
    feed.close()


def test_what_has_come_is_ready_until_it_is_taken(feed: Feed) -> None:
    op = Op.parse("F0")
    feed.asks(LOOK_AHEAD)
    assert not feed.inbox.ready(op)
    feed.answer("F1", "F0")
    feed.inbox.take(Op.parse("F1"))
    feed.asks(1)
    feed.answer("F3")
    feed.inbox.take(Op.parse("F3"))  # came after F0
    assert feed.inbox.ready(op)
    feed.inbox.take(op)
    assert not feed.inbox.ready(op)


def test_what_was_not_asked_for_or_comes_twice_is_left_out(feed: Feed) -> None:
    feed.asks(LOOK_AHEAD)
    feed.answer("F7", "F0", "F0", "F1")
    feed.inbox.take(Op.parse("F0"))
    feed.inbox.take(Op.parse("F1"))
    assert not feed.inbox.ready(Op.parse("F0"))
    assert not feed.inbox.ready(Op.parse("F7"))


def test_a_feed_that_is_too_slow_is_named(tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    inbox = feed.open(wait_timeout_s=0.05)
    text = r"stage 0 waited 0.05 s for the inputs of F0 .* data set that slow\? --wait-timeout"
    with pytest.raises(DeadlineError, match=text):
        inbox.take(Op.parse("F0"))
    feed.close()


# -- stopping early -----------------------------------------------------------------------------


def stop_before(feed: Feed, batch: int) -> None:
    feed.work = WORK.stopped_before(batch)
    feed.inbox.stop_before(batch)


def test_after_a_stop_the_evaluation_at_the_new_end_is_asked_for(feed: Feed) -> None:
    feed.feed(1)
    assert feed.asks(LOOK_AHEAD) == ["F1", "F2", "F3"]
    stop_before(feed, 2)
    assert feed.asks(2) == ["E0.0", "E0.1"]
    feed.answer("F1", "E0.0", "E0.1")
    for op in ("F1", "E0.0", "E0.1"):
        assert feed.inbox.take(Op.parse(op)) is not None
    assert feed.is_quiet()


def test_a_batch_that_is_cut_off_is_nothing(feed: Feed) -> None:
    feed.feed(1)
    stop_before(feed, 2)
    assert feed.inbox.take(Op.parse("F2")) is None
    assert feed.inbox.take(Op.parse("F7")) is None


def test_a_wait_for_a_batch_that_is_cut_off_ends(feed: Feed) -> None:
    found: list[Parcel | None] = []
    feed.feed(2)
    with in_background(lambda: found.append(feed.inbox.take(Op.parse("F2")))):
        stop_before(feed, 2)
    assert found == [None]


def test_what_comes_after_it_was_cut_off_is_left_out(feed: Feed) -> None:
    feed.asks(LOOK_AHEAD)
    stop_before(feed, 1)
    feed.answer("F2", "F0")
    feed.inbox.take(Op.parse("F0"))
    assert not feed.inbox.ready(Op.parse("F2"))


# -- a feed that was restarted ------------------------------------------------------------------


def test_what_was_not_answered_is_asked_for_again(feed: Feed) -> None:
    feed.asks(LOOK_AHEAD)
    feed.answer("F1")
    feed.inbox.take(Op.parse("F1"))
    assert feed.asks(1) == ["F3"]
    feed.inbox.ask_again()
    assert feed.asks(3) == ["F0", "F2", "F3"]


def test_what_has_come_and_is_not_taken_is_not_asked_for_again(feed: Feed) -> None:
    feed.asks(LOOK_AHEAD)
    feed.answer("F0", "F1")
    feed.inbox.take(Op.parse("F1"))
    feed.asks(1)
    feed.inbox.ask_again()
    assert feed.asks(2) == ["F2", "F3"]


def test_a_stage_that_goes_on_from_a_snapshot_asks_from_there(tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    feed.inbox = FeedInbox(
        "inputs",
        birth=worker_birth(data=feed.server.ipc_endpoint),
        context=feed.context,
        ops=lambda: stage_ops(Schedule.ASYNCHRONOUS, 0, 1, WORK, updates=4),
        device=CPU,
        wait_timeout_s=LONG_S,
    )
    assert feed.asks(LOOK_AHEAD) == ["E0.0", "E0.1", "F4"]
    feed.close()
