from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from links import (
    BACKENDS_ON_CPU,
    CPU,
    RUN_ID,
    in_background,
    receiving_peer,
    receiving_stream,
    sending_peer,
    sending_stream,
    stream_pair,
)
from waiting import wait_until

from spectrain.protocol.errors import (
    DeadlineError,
    JobError,
    LinkError,
    ProtocolError,
    SpectrainError,
)
from spectrain.protocol.messages import (
    Announce,
    Boundary,
    Message,
    StreamHello,
    StreamRefused,
    StreamWelcome,
    TensorSpec,
)
from spectrain.protocol.schedule import Op
from spectrain.protocol.sockets import Authority, Client, KeyPair
from spectrain.worker.boundary import Parcel, describe, tensors_of
from spectrain.worker.link import SENDER, open_link
from spectrain.worker.memory_stream import memory_pair
from spectrain.worker.stream import ReceivingStream


@pytest.fixture(params=BACKENDS_ON_CPU)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def op(text: str) -> Op:
    return Op.parse(text)


def parcel(text: str, value: object = None, samples: int = 2, batch_samples: int = 4) -> Parcel:
    if value is None:
        value = torch.full((2, 3), float(op(text).batch))
    return Parcel(op(text), value, samples, batch_samples)


def varied_parcels() -> list[Parcel]:
    """Return parcels whose shapes, forms and types change from one to the next."""
    torch.manual_seed(0)
    needs_grad = torch.randn(3, 4, requires_grad=True) * 2
    return [
        parcel("F0", torch.randn(8, 16)),
        parcel("F1", torch.randn(3, 16), samples=1),
        parcel("F2", (needs_grad, None, torch.tensor([[True, False], [False, True]]))),
        parcel("E0.3", {"ids": torch.arange(5), "none": None, "empty": torch.empty(0, 7)}),
        parcel("F3", torch.randn(2, 5).bfloat16().transpose(0, 1)),
        parcel("F4.2", (torch.randn(4, dtype=torch.complex64).conj(), torch.tensor(3))),
        parcel("B3", {"x": torch.randn(2, 2), "mask": None}),
        Parcel(op("B4"), None, 1, 1),
        parcel("F5", ()),
    ]


def assert_same(one: Parcel, other: Parcel) -> None:
    assert (one.op, one.samples, one.batch_samples) == (
        other.op,
        other.samples,
        other.batch_samples,
    )
    assert describe(one.value) == describe(other.value)
    assert all(map(torch.equal, tensors_of(one.value), tensors_of(other.value)))


# -- what a stream delivers ---------------------------------------------------------------------


def test_parcels_of_every_form_arrive_as_they_do_in_memory(tmp_path: Path, backend: str) -> None:
    outbox, inbox = memory_pair()
    parcels = varied_parcels()
    with stream_pair(tmp_path, backend=backend, window=len(parcels)) as pair:
        pair.connect()
        for each in parcels:
            outbox.put(each)
            pair.sender.put(each)
        pair.sender.flush(timeout_s=20)
        for each in parcels:
            assert_same(pair.receiver.take(each.op), inbox.take(each.op))


def test_parcels_may_be_taken_in_another_order_than_they_came(tmp_path: Path, backend: str) -> None:
    with stream_pair(tmp_path, backend=backend) as pair:
        pair.connect()
        for text in ("F0", "F1", "E0.0"):
            pair.sender.put(parcel(text))
        assert pair.receiver.take(op("E0.0")).op == op("E0.0")
        assert pair.receiver.take(op("F1")).value.unique().tolist() == [1]
        assert pair.receiver.take(op("F0")).value.unique().tolist() == [0]


def test_a_parcel_is_ready_once_it_is_here_and_until_it_is_taken(tmp_path: Path) -> None:
    with stream_pair(tmp_path) as pair:
        pair.connect()
        assert not pair.receiver.ready(op("F0"))
        pair.sender.put(parcel("F0"))
        wait_until(lambda: pair.receiver.ready(op("F0")), what="F0")
        pair.receiver.take(op("F0"))
        assert not pair.receiver.ready(op("F0"))


def test_what_was_put_does_not_change_with_a_later_update(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    with stream_pair(tmp_path) as pair:
        pair.sender.put(parcel("F0", (weight * 1, weight)))  # not connected yet, so it waits
        with torch.no_grad():
            weight.fill_(9)
        pair.connect()
        received = pair.receiver.take(op("F0")).value
        assert [tensor.tolist() for tensor in received] == [[0, 0, 0]] * 2
        assert all(tensor.requires_grad and tensor.is_leaf for tensor in received)


def test_an_impossible_value_is_refused_where_it_is_put(tmp_path: Path) -> None:
    with stream_pair(tmp_path) as pair, pytest.raises(JobError, match="returned a list"):
        pair.sender.put(parcel("F0", [torch.zeros(1)]))


def test_a_stream_over_tcp_delivers_to_a_sender_with_a_known_key() -> None:
    senders, receivers = KeyPair.new(), KeyPair.new()
    with zmq.Context() as context:
        authority = Authority(context, {senders.public: "worker/0/"})
        receiver = receiving_stream(context, None, keys=receivers, authority=authority)
        sender = sending_stream(context, keys=senders)
        receiver.expect(1, sending_peer())
        sender.connect(1, receiving_peer(receiver.endpoint, receivers.public))
        sender.put(parcel("F7"))
        assert receiver.take(op("F7")).samples == 2
        assert receiver.endpoint.startswith("tcp://127.0.0.1:")
        sender.close()
        receiver.close()
        authority.close()


# -- waiting ------------------------------------------------------------------------------------


def test_a_receiver_holds_its_window_and_then_the_sender_waits(
    tmp_path: Path, backend: str
) -> None:
    unread = 2 if backend == "direct" else 0  # which are offered, and read when there is room
    with stream_pair(tmp_path, backend=backend, window=2, wait_timeout_s=2) as pair:
        pair.connect()
        large = torch.zeros(3 << 20)  # more than any socket holds on its way
        waits = 2 + unread
        for number in range(waits + 2):  # two are held there, and two wait here
            pair.sender.put(parcel(f"F{number}", large))
        wait_until(lambda: pair.receiver.ready(op("F1")), what="F1")
        text = rf"stage 0 waited 2 s for stage 1 to take F{waits}; see"
        with pytest.raises(DeadlineError, match=text):
            pair.sender.put(parcel(f"F{waits + 2}", large))
        assert not pair.receiver.ready(op("F2"))
        for number in range(waits + 2):
            pair.receiver.take(op(f"F{number}"))
        pair.sender.put(parcel("F9"))
        assert pair.receiver.take(op("F9")).op == op("F9")


def test_a_parcel_that_does_not_come_is_a_deadline_that_names_it(
    tmp_path: Path, backend: str
) -> None:
    with stream_pair(tmp_path, backend=backend, wait_timeout_s=0.2) as pair:
        pair.connect()
        with pytest.raises(DeadlineError, match=r"0\.2 s for F0 from stage 0 \(none came yet\)"):
            pair.receiver.take(op("F0"))
        pair.sender.put(parcel("F16"))
        pair.receiver.take(op("F16"))
        with pytest.raises(
            DeadlineError,
            match=r"stage 1 waited 0\.2 s for F17 from stage 0 \(the newest from there is F16\)",
        ):
            pair.receiver.take(op("F17"))


def test_waiting_is_counted_on_both_sides(tmp_path: Path) -> None:
    with stream_pair(tmp_path, window=1) as pair, ThreadPoolExecutor() as pool:
        pair.connect()
        taken = pool.submit(pair.receiver.take, op("F0"))
        wait_until(lambda: len(pair.receiver._gate._changed._waiters) > 0, what="take to wait")
        pair.sender.put(parcel("F0"))
        taken.result(10)
        assert pair.receiver.waited_s > 0
        for number in range(1, 3):
            pair.sender.put(parcel(f"F{number}"))
        put = pool.submit(pair.sender.put, parcel("F3"))
        wait_until(lambda: len(pair.sender._gate._changed._waiters) > 0, what="put to wait")
        pair.receiver.take(op("F1"))
        put.result(10)
        assert pair.sender.waited_s > 0


def test_flush_waits_until_the_peer_takes_everything(tmp_path: Path) -> None:
    with stream_pair(tmp_path, window=1) as pair:
        pair.connect()
        pair.sender.put(parcel("F0"))
        pair.sender.flush(timeout_s=10)
        wait_until(lambda: pair.receiver.ready(op("F0")), what="F0")
        pair.sender.put(parcel("F1"))
        with pytest.raises(DeadlineError, match=r"0\.1 s for stage 1 to take F1"):
            pair.sender.flush(timeout_s=0.1)


def test_a_window_lets_something_through(tmp_path: Path) -> None:
    with zmq.Context() as context, pytest.raises(AssertionError, match="window of 0"):
        sending_stream(context, window=0)


def test_whoever_waits_for_a_forward_that_is_cut_off_gets_nothing(tmp_path: Path) -> None:
    with stream_pair(tmp_path) as pair, ThreadPoolExecutor() as pool:
        pair.connect()
        taken = pool.submit(pair.receiver.take, op("F5"))
        pair.receiver.stop_before(5)
        assert taken.result(10) is None
        pair.sender.put(parcel("F4"))
        pair.sender.put(parcel("E5.0"))
        assert pair.receiver.take(op("F4")).op == op("F4")
        assert pair.receiver.take(op("E5.0")).op == op("E5.0")


# -- an end that fails or goes ------------------------------------------------------------------


def test_a_neighbour_that_is_gone_is_told_of_once_and_waited_for(
    tmp_path: Path, backend: str
) -> None:
    with stream_pair(tmp_path, backend=backend, wait_timeout_s=0.1) as pair:
        pair.connect()
        pair.sender.put(parcel("F0"))
        pair.sender.flush(timeout_s=10)
        pair.sender.close()
        wait_until(lambda: pair.lost_by_receiver, what="the loss")
        assert re.search("stage 0.* closed", pair.lost_by_receiver[0])
        assert pair.receiver.take(op("F0")).op == op("F0")  # what had come is still good
        assert not pair.receiver.is_connected

        def take() -> None:  # no deadline while there is nobody who could send
            with pytest.raises(LinkError, match="stage 1 is closed"):
                pair.receiver.take(op("F1"))

        with in_background(take) as thread:
            thread.join(0.5)
            assert thread.is_alive()
            pair.receiver.close()
        assert len(pair.lost_by_receiver) == 1


def test_gloo_tells_a_sender_that_its_receiver_is_gone(tmp_path: Path) -> None:
    with stream_pair(tmp_path, window=1) as pair:
        pair.connect()
        pair.receiver.close()
        pair.sender.put(parcel("F0"))
        wait_until(lambda: pair.lost_by_sender, what="the loss")
        assert "could not send F0 to stage 1" in pair.lost_by_sender[0]
        assert not pair.sender.is_connected
        assert not pair.faults


def test_strict_leaves_a_sender_waiting_until_it_is_closed(tmp_path: Path) -> None:
    with stream_pair(tmp_path, backend="strict", window=1) as pair:
        pair.connect()
        pair.receiver.close()
        pair.sender.put(parcel("F0"))
        with pytest.raises(DeadlineError):
            pair.sender.flush(timeout_s=0.5)
        pair.sender.close()
        assert not pair.sender._thread.is_alive()


def test_close_frees_whoever_waits(tmp_path: Path, backend: str) -> None:
    with stream_pair(tmp_path, backend=backend) as pair:
        pair.connect()

        def take() -> None:
            with pytest.raises(LinkError, match="activations stream of stage 1 is closed"):
                pair.receiver.take(op("F0"))

        with in_background(take):
            pair.receiver.close()


def test_close_frees_a_thread_that_waits_in_the_link(tmp_path: Path, backend: str) -> None:
    with stream_pair(tmp_path, backend=backend, window=1) as pair:
        pair.connect()
        for number in range(2):
            pair.sender.put(parcel(f"F{number}"))
        pair.sender.close()
        assert not pair.sender._thread.is_alive()


def test_an_end_that_was_never_connected_closes(tmp_path: Path) -> None:
    text = "the activations link with its neighbour"
    with stream_pair(tmp_path) as pair, pytest.raises(DeadlineError, match=text):
        pair.sender.wait_connected(timeout_s=0.05)


def test_a_receiver_that_is_not_there_is_a_deadline_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    with zmq.Context() as context:
        sender = sending_stream(context)
        sender.connect(1, receiving_peer(f"ipc://{tmp_path}/nobody"))
        with pytest.raises(DeadlineError, match="the activations link with stage 1"):
            sender.wait_connected(timeout_s=0.2)
        sender.close()


def test_a_fault_of_our_own_in_the_thread_reaches_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **named: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr("spectrain.worker.stream_end.open_link", broken)
    with stream_pair(tmp_path) as pair:
        pair.sender.connect(1, receiving_peer(pair.receiver.endpoint))
        with pytest.raises(SpectrainError, match="ValueError: broken") as caught:
            pair.sender.wait_connected(timeout_s=10)
        assert not isinstance(caught.value, LinkError)
        assert isinstance(caught.value.__cause__, ValueError)
        assert pair.faults == [caught.value.__cause__]
        assert not pair.lost_by_sender
        with pytest.raises(SpectrainError, match="ValueError: broken"):
            pair.sender.put(parcel("F0"))


def test_a_fault_elsewhere_frees_whoever_waits_here(tmp_path: Path) -> None:
    with stream_pair(tmp_path) as pair:
        pair.connect()

        def take() -> None:
            with pytest.raises(ProtocolError, match="elsewhere"):
                pair.receiver.take(op("F0"))

        with in_background(take):
            pair.receiver.fail(ProtocolError("elsewhere"))


def test_a_thread_that_does_not_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("spectrain.worker.stream_end._END_TIMEOUT_S", 0)
    with stream_pair(tmp_path) as pair:
        pair.connect()
        with pair.sender._gate:  # the thread needs it, so it cannot end yet
            pair.sender.put(parcel("F0"))
            pair.sender.close()
        assert "has not ended" in caplog.text
        monkeypatch.undo()


# -- generations --------------------------------------------------------------------------------


def test_a_new_generation_goes_on_where_the_old_one_was_cut(tmp_path: Path, backend: str) -> None:
    numbers = range(6)
    with stream_pair(tmp_path, backend=backend, window=2) as pair, ThreadPoolExecutor() as pool:
        pair.connect(1)

        def put_all() -> None:
            for number in numbers:
                pair.sender.put(parcel(f"F{number}"))

        put = pool.submit(put_all)
        wait_until(lambda: pair.receiver.ready(op("F1")), what="a full window")
        pair.connect(2)
        for number in numbers:
            taken = pair.receiver.take(op(f"F{number}"))
            assert taken.value.unique().tolist() == [number]
        put.result(10)


def test_a_link_that_broke_is_replaced_by_the_next_generation_only(tmp_path: Path) -> None:
    with stream_pair(tmp_path) as pair:
        pair.connect(1)
        pair.receiver._link.abort()
        pair.sender._link.abort()
        pair.sender.put(parcel("F0"))
        wait_until(lambda: pair.lost_by_sender, what="the loss")
        pair.receiver.expect(1, sending_peer())
        pair.sender.connect(1, receiving_peer(pair.receiver.endpoint))
        assert not pair.sender.is_connected
        pair.connect(2)
        assert pair.receiver.take(op("F0")).op == op("F0")  # it was kept


def test_a_generation_that_is_asked_for_again_or_too_late_changes_nothing(tmp_path: Path) -> None:
    with stream_pair(tmp_path) as pair:
        pair.connect(2)
        links = pair.sender._link, pair.receiver._link
        for generation in (2, 1):
            pair.receiver.expect(generation, sending_peer(incarnation=7))
            pair.sender.connect(generation, receiving_peer("ipc:///nowhere"))
        assert pair.sender.is_connected
        pair.sender.put(parcel("F0"))
        assert pair.receiver.take(op("F0")).op == op("F0")
        assert (pair.sender._link, pair.receiver._link) == links


def test_a_sender_that_is_told_first_waits_for_the_receiver(tmp_path: Path) -> None:
    with stream_pair(tmp_path) as pair:
        pair.connect(1)
        pair.sender.connect(2, receiving_peer(pair.receiver.endpoint))
        wait_until(lambda: pair.receiver._hello, what="a hello that is kept")
        pair.receiver.expect(2, sending_peer())
        pair.sender.wait_connected(timeout_s=20)


def test_a_receiver_that_is_told_first_does_not_answer_an_old_generation(tmp_path: Path) -> None:
    with stream_pair(tmp_path) as pair:
        pair.receiver.expect(2, sending_peer())
        pair.sender.connect(1, receiving_peer(pair.receiver.endpoint))
        with pytest.raises(DeadlineError):
            pair.sender.wait_connected(timeout_s=0.3)
        assert pair.receiver.refused == 1
        pair.sender.connect(2, receiving_peer(pair.receiver.endpoint))
        pair.sender.wait_connected(timeout_s=20)


def test_another_incarnation_is_refused(tmp_path: Path) -> None:
    with stream_pair(tmp_path) as pair:
        pair.receiver.expect(1, sending_peer(incarnation=1))
        pair.sender.connect(1, receiving_peer(pair.receiver.endpoint))
        with pytest.raises(
            ProtocolError, match=r"stage 1 refuses the activations link: .*\(0, 0, 'gloo'\)"
        ):
            pair.sender.wait_connected(timeout_s=10)
        assert pair.receiver.refused == 1


# -- senders that do not keep to the protocol ---------------------------------------------------


class HandMadeSender:
    """Speaks the sender's part word by word."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.link = None

    def greet(self, attempt: int = 1, incarnation: int = 0, own: bytes = b"") -> None:
        self.client.send(
            StreamHello(
                stream="activations",
                stage=0,
                incarnation=incarnation,
                generation=1,
                attempt=attempt,
                backend="gloo",
                address=own,
            )
        )

    def answer(self) -> Message:
        received = self.client.receive(10)
        assert received is not None
        return received[0]

    def connect(self) -> None:
        def exchange(own: bytes) -> bytes:
            self.greet(own=own)
            welcome = self.answer()
            assert isinstance(welcome, StreamWelcome)
            return welcome.address

        self.link = open_link(
            "gloo",
            SENDER,
            peer="stage 1",
            address="127.0.0.1",
            device=CPU,
            exchange=exchange,
            timeout_s=10,
        )

    def announce(self, text: str = "F0", **changes: object) -> None:
        arguments = {
            "op": text,
            "samples": 1,
            "batch_samples": 1,
            "boundary": Boundary(form="tuple", tensors=()),
            "generation": 1,
            "position": 0,
        }
        self.client.send(Announce(**{**arguments, **changes}))


@contextmanager
def hand_made_sender(
    tmp_path: Path, identity: str = "worker/0/0/activations", generation: int = 1
) -> Iterator[tuple[HandMadeSender, ReceivingStream]]:
    with zmq.Context() as context:
        receiver = receiving_stream(context, tmp_path)
        receiver.expect(generation, sending_peer())
        client = Client(context, run_id=RUN_ID, identity=identity, endpoint=receiver.endpoint)
        sender = HandMadeSender(client)
        try:
            yield sender, receiver
        finally:
            receiver.close()
            client.close()
            if sender.link is not None:
                sender.link.close()


TOO_LARGE = Boundary(form="tensor", tensors=(TensorSpec(dtype="int64", shape=(2**40,)),))


@pytest.mark.parametrize(
    ("announcement", "text"),
    [
        ({"position": -1}, "stage 0 announced F0 as parcel -1 .* parcel 0 or a later one is due"),
        ({"samples": 2}, "F0 has 2 of 1 samples"),
        ({"samples": 0}, "F0 has 0 of 1 samples"),
        ({"boundary": TOO_LARGE}, "at most"),
        ({"text": "X1"}, "not an op: 'X1'"),
    ],
    ids=["position", "samples", "no samples", "size", "op"],
)
def test_an_announcement_that_cannot_be_is_a_fault(
    tmp_path: Path, announcement: dict[str, Any], text: str
) -> None:
    with hand_made_sender(tmp_path) as (sender, receiver):
        sender.connect()
        sender.announce(**announcement)
        with pytest.raises(SpectrainError, match=text):
            receiver.take(op("F0"))


def test_an_op_that_is_here_already_is_a_fault(tmp_path: Path) -> None:
    with hand_made_sender(tmp_path) as (sender, receiver):
        sender.connect()
        sender.announce("F0")
        sender.announce("F0", position=1)
        with pytest.raises(ProtocolError, match="announced F0 as parcel 1"):
            receiver.take(op("F9"))


def test_an_announcement_of_another_generation_is_dropped(tmp_path: Path) -> None:
    with hand_made_sender(tmp_path) as (sender, receiver):
        sender.announce("F7")  # before there is a link
        sender.connect()
        sender.announce("F8", generation=0)
        sender.announce("F9")
        assert receiver.take(op("F9")).value == ()
        assert not receiver.ready(op("F7"))
        assert not receiver.ready(op("F8"))


def test_a_hello_in_anothers_name_is_not_answered(tmp_path: Path) -> None:
    with hand_made_sender(tmp_path, identity="worker/2/0/activations") as (sender, _):
        sender.greet()
        assert sender.client.receive(0.3) is None


def test_only_the_newest_of_several_hellos_is_answered(tmp_path: Path) -> None:
    with hand_made_sender(tmp_path, generation=0) as (sender, receiver):
        # Both hellos are for the next generation, of which the receiver has not heard yet.
        sender.greet(attempt=1, incarnation=0)
        sender.greet(attempt=2, incarnation=0)
        wait_until(lambda: receiver._hello and receiver._hello.attempt == 2, what="the hellos")
        receiver.expect(1, sending_peer(incarnation=5))
        assert isinstance(sender.answer(), StreamRefused)
        assert sender.client.receive(0.3) is None
