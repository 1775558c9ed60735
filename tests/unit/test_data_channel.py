"""The coordinator's answers to requests for data, over a real socket."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from torch.utils.data import Dataset, TensorDataset
from zmq.utils.garbage import gc as zmq_collector

from spectrain.coordinator.data_channel import DataChannel
from spectrain.coordinator.feed import Feed
from spectrain.protocol.codec import MAX_PAYLOAD_BYTES
from spectrain.protocol.messages import (
    FeedBatch,
    FeedRequest,
    Heartbeat,
    Message,
    TensorSpec,
    WeightsPart,
)
from spectrain.protocol.sockets import Client, Server

RUN = bytes(16)
LONG_S = 20.0
X = torch.arange(40, dtype=torch.float32).reshape(10, 4)
Y = torch.arange(10)
PART = WeightsPart(
    stage=0, incarnation=0, name="0.weight", spec=TensorSpec(dtype="float32", shape=(4,))
)


@pytest.fixture(scope="module", autouse=True)
def _collector_of_uncopied_frames() -> Iterator[None]:
    """Start pyzmq's own thread here, so that it is nobody's leak, and end it."""
    zmq.Frame(bytes(1 << 17), copy=False)
    yield
    zmq_collector.stop()


class Channel:
    """A data channel, one client, and what its owner is told."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        path = folder / "data.sock"
        server = Server(self.context, run_id=RUN, ipc=path, max_frame_bytes=MAX_PAYLOAD_BYTES)
        self.weights: queue.Queue[tuple[WeightsPart, bytes]] = queue.Queue()
        self.errors: queue.Queue[Exception] = queue.Queue()
        self.channel = DataChannel(
            server,
            on_weights=lambda part, payload: self.weights.put((part, bytes(payload))),
            on_error=self.errors.put,
        )
        self.client = Client(
            self.context, run_id=RUN, identity="worker/0/0/inputs", endpoint=server.ipc_endpoint
        )

    def start(self, train: Any = None, **changes: Any) -> None:
        data = TensorDataset(X, Y) if train is None else train
        self.channel.start(Feed(data, TensorDataset(X[:3], Y[:3]), batch_size=4, seed=0, **changes))

    def ask(self, *ops: str, part: str = "inputs") -> None:
        self.client.send(FeedRequest(part=part, ops=ops))

    def answer(self) -> tuple[Message, list[Any]]:
        received = self.client.receive(LONG_S)
        assert received is not None, "no answer"
        return received

    def answered(self, count: int) -> list[str]:
        """Return the ops of so many answers."""
        messages = [self.answer()[0] for _ in range(count)]
        return [message.op for message in messages if isinstance(message, FeedBatch)]

    def close(self) -> None:
        self.channel.close()
        self.client.close()
        self.context.term()


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    channel = Channel(tmp_path)
    yield channel
    channel.close()


def test_a_request_is_answered_op_by_op_in_its_order(channel: Channel) -> None:
    channel.start()
    channel.ask("F1", "E0.0", "F0")
    assert channel.answered(3) == ["F1", "E0.0", "F0"]


def test_an_answer_holds_the_bytes_and_all_that_is_needed_to_read_them(channel: Channel) -> None:
    channel.start()
    channel.ask("E0.0")
    message, (frame,) = channel.answer()
    assert isinstance(message, FeedBatch)
    assert (message.part, message.samples, message.batch_samples) == ("inputs", 3, 3)
    assert message.boundary.tensors == (TensorSpec(dtype="float32", shape=(3, 4)),)
    assert bytes(frame) == X[:3].numpy().tobytes()


def test_inputs_and_targets_of_one_op_are_of_the_same_samples(channel: Channel) -> None:
    channel.start()
    channel.ask("F1")
    channel.ask("F1", part="targets")
    inputs, targets = channel.answer()[0], channel.answer()[0]
    assert isinstance(inputs, FeedBatch)
    assert isinstance(targets, FeedBatch)
    assert (inputs.part, targets.part) == ("inputs", "targets")
    assert inputs.ids_digest == targets.ids_digest


def test_any_op_may_be_asked_for_again_with_the_same_result(channel: Channel) -> None:
    channel.start()
    channel.ask("F2", "F0", "F2")
    (_, (first,)), _, (_, (again,)) = (channel.answer() for _ in range(3))
    assert bytes(first) == bytes(again)


def test_what_is_asked_before_the_feed_is_there_is_answered_later(channel: Channel) -> None:
    channel.ask("F0")
    channel.start()
    assert channel.answered(1) == ["F0"]


def test_a_stop_names_the_first_batch_that_nobody_has_asked_for(channel: Channel) -> None:
    channel.start(epochs=5)
    channel.ask("F3", "F1")
    channel.answered(2)
    assert channel.channel.stop_feeding() == 4


def test_a_stop_lets_through_what_was_asked_for_before_this_process(channel: Channel) -> None:
    channel.start(epochs=5)
    channel.ask("F3")
    channel.answered(1)
    assert channel.channel.stop_feeding(at_least=6) == 6
    channel.ask("F6", "F5")
    assert channel.answered(1) == ["F5"]


def test_a_second_stop_names_the_same_batch(channel: Channel) -> None:
    channel.start(epochs=5)
    assert channel.channel.stop_feeding() == 0
    channel.ask("E0.0")
    channel.answered(1)
    assert channel.channel.stop_feeding() == 0


def test_after_a_stop_later_batches_are_not_given_out_but_evaluation_is(channel: Channel) -> None:
    channel.start(epochs=5)
    channel.ask("F2")
    channel.answered(1)
    assert channel.channel.stop_feeding() == 3
    channel.ask("F3", "F2", "F9", "E0.0")
    assert channel.answered(2) == ["F2", "E0.0"]


def test_a_stop_from_before_this_process_holds(channel: Channel) -> None:
    channel.channel.stop_feeding_before(2)
    channel.start(epochs=5)
    channel.ask("F2", "F1")
    assert channel.answered(1) == ["F1"]
    assert channel.channel.stop_feeding() == 2


def test_weights_are_handed_on_with_their_bytes(channel: Channel) -> None:
    channel.start()
    channel.client.send(PART, [b"1234567890123456"])
    assert channel.weights.get(timeout=LONG_S) == (PART, b"1234567890123456")


def test_messages_that_do_not_belong_here_change_nothing(channel: Channel) -> None:
    channel.start()
    channel.client.send(Heartbeat())
    channel.ask("F0")
    assert channel.answered(1) == ["F0"]


@pytest.mark.parametrize(
    "request_", [("inputs", "X9"), ("inputs", "F"), ("inputs", "B1"), ("labels", "F0")]
)
def test_a_request_for_what_no_feed_has_is_dropped(
    channel: Channel, request_: tuple[str, str]
) -> None:
    part, op = request_
    channel.start()
    channel.ask(op, part=part)
    channel.ask("F0")
    assert channel.answered(1) == ["F0"]
    assert channel.errors.empty()


def test_weights_without_their_bytes_are_dropped(channel: Channel) -> None:
    channel.start()
    channel.client.send(PART)
    channel.client.send(PART, [b"1234567890123456"])
    assert channel.weights.get(timeout=LONG_S) == (PART, b"1234567890123456")
    assert channel.errors.empty()


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError(f"no sample {index}")


def test_an_error_of_the_data_set_is_told_and_ends_the_answers(channel: Channel) -> None:
    channel.start(train=Broken())
    channel.ask("F0", "E0.0")
    assert "no sample" in str(channel.errors.get(timeout=LONG_S))
    thread = channel.channel._thread
    assert thread is not None
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert channel.client.receive(0) is None


def test_a_part_that_cannot_be_taken_is_dropped_and_the_answers_go_on(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spectrain.protocol.errors import ProtocolError

    def refuse(*_: object) -> None:
        raise ProtocolError("not this model's")

    monkeypatch.setattr(channel.channel, "_on_weights", refuse)
    channel.start()
    channel.client.send(PART, [b"1234567890123456"])
    channel.ask("F0")
    assert channel.answered(1) == ["F0"]
    assert channel.errors.empty()


def test_a_channel_that_is_closed_before_the_job_is_loaded_does_not_start(
    channel: Channel,
) -> None:
    channel.channel.close()
    channel.start()
    assert channel.channel._thread is None


def test_a_channel_that_never_started_can_be_closed(channel: Channel) -> None:
    assert channel.channel.stop_feeding() == 0
