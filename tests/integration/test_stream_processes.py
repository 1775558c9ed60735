from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import stream_neighbour
import torch
import zmq
from links import (
    BACKENDS_ON_CPU,
    receiving_peer,
    receiving_stream,
    sending_peer,
    sending_stream,
)
from stream_neighbour import neighbours_digest, neighbours_parcel
from waiting import wait_until

from spectrain.protocol.errors import DeadlineError
from spectrain.protocol.schedule import Kind, Op
from spectrain.worker.boundary import Parcel, tensors_of
from spectrain.worker.memory_stream import memory_pair
from spectrain.worker.stream import ReceivingStream, SendingStream
from spectrain.worker.stream_log import digest_of

START_TIMEOUT_S = 60


@pytest.fixture(params=BACKENDS_ON_CPU)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


class Neighbour:
    """A process at the other end, which obeys lines (see ``stream_neighbour``)."""

    def __init__(self, role: str, ipc_dir: Path, backend: str, incarnation: int = 0) -> None:
        self.incarnation = incarnation
        self.process = subprocess.Popen(
            [
                sys.executable,
                stream_neighbour.__file__,
                role,
                str(ipc_dir),
                backend,
                str(incarnation),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.endpoint = self.read() if role == "receiver" else ""

    def say(self, *lines: str) -> None:
        self.process.stdin.write("".join(f"{line}\n" for line in lines))
        self.process.stdin.flush()

    def read(self) -> str:
        return self.process.stdout.readline().strip()

    def take(self, *numbers: int) -> None:
        """Let a receiver take these; they must be what the sender makes of their number."""
        self.say(*(f"take {number}" for number in numbers))
        for number in numbers:
            assert self.read() == f"{number} {neighbours_digest(number)}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def neighbours(ipc_dir: Path, backend: str) -> Iterator[Callable[..., Neighbour]]:
    """Yield what starts neighbours, ``start(role, incarnation=0)``; they are dead at the end."""
    started: list[Neighbour] = []

    def start(role: str, incarnation: int = 0) -> Neighbour:
        started.append(Neighbour(role, ipc_dir, backend, incarnation))
        return started[-1]

    try:
        yield start
    finally:
        for each in started:
            each.process.kill()
            each.process.communicate()


@contextmanager
def stream_from_neighbour(
    ipc_dir: Path, backend: str, **changes: object
) -> Iterator[tuple[ReceivingStream, Neighbour]]:
    """Yield a receiving end here and the process of its sender, connected."""
    with zmq.Context() as context, neighbours(ipc_dir, backend) as start:
        arguments = {"wait_timeout_s": 30, **changes}
        receiver = receiving_stream(context, ipc_dir, backend=backend, **arguments)
        receiver.expect(1, sending_peer())
        sender = start("sender")
        sender.say(f"connect 1 0 {receiver.endpoint}")
        try:
            receiver.wait_connected(START_TIMEOUT_S)
            yield receiver, sender
        finally:
            receiver.close()


@contextmanager
def stream_to_neighbour(
    ipc_dir: Path, backend: str, **changes: object
) -> Iterator[tuple[SendingStream, Neighbour]]:
    """Yield a sending end here and the process of its receiver, connected."""
    with zmq.Context() as context, neighbours(ipc_dir, backend) as start:
        receiver = start("receiver")
        receiver.say("connect 1 0")
        sender = sending_stream(context, backend=backend, **{"window": 2, **changes})
        sender.connect(1, receiving_peer(receiver.endpoint))
        try:
            sender.wait_connected(START_TIMEOUT_S)
            yield sender, receiver
        finally:
            sender.close()


def large_parcel(number: int) -> Parcel:
    return Parcel(Op(Kind.FORWARD, number), torch.zeros(3 << 20), 1, 1)


def test_parcels_from_another_process_are_those_of_a_stream_in_memory(
    tmp_path: Path, backend: str
) -> None:
    numbers = range(100)
    outbox, inbox = memory_pair()
    with stream_from_neighbour(tmp_path, backend) as (receiver, sender):
        sender.say(*["put"] * len(numbers))
        for number in numbers:
            expected = neighbours_parcel(number)
            outbox.put(expected)
            ours, theirs = inbox.take(expected.op), receiver.take(expected.op)
            assert (ours.samples, ours.number) == (theirs.samples, theirs.number)
            assert ours.value[1] == theirs.value[1]
            assert all(map(torch.equal, tensors_of(ours.value), tensors_of(theirs.value)))


def test_a_neighbour_that_is_killed_while_it_owes_nothing_is_noticed(
    tmp_path: Path, backend: str
) -> None:
    lost: list[str] = []
    with stream_from_neighbour(tmp_path, backend, on_link_lost=lost.append) as (receiver, sender):
        sender.say("put")
        receiver.take(Op.parse("F0"))
        sender.kill()
        wait_until(lambda: lost, what="the loss")
        assert re.search(r"stage 0 is gone|could not hear from stage 0", lost[0])


def test_a_neighbour_that_is_stopped_is_a_deadline_that_names_what_it_owes(
    tmp_path: Path, backend: str
) -> None:
    with stream_from_neighbour(tmp_path, backend, wait_timeout_s=1) as (receiver, sender):
        sender.say("put")
        receiver.take(Op.parse("F0"))
        sender.process.send_signal(signal.SIGSTOP)
        with pytest.raises(
            DeadlineError,
            match=r"stage 1 waited 1 s for F1 from stage 0 \(the newest from there is F0\)",
        ):
            receiver.take(Op.parse("F1"))
        assert receiver.is_connected


def test_gloo_tells_a_sender_whose_receiver_is_killed(tmp_path: Path) -> None:
    lost: list[str] = []
    with stream_to_neighbour(tmp_path, "gloo", on_link_lost=lost.append) as (sender, receiver):
        for number in range(3):  # one is held there, the others wait in the link and behind it
            sender.put(Parcel(Op(Kind.FORWARD, number), torch.zeros(1), 1, 1))
        receiver.kill()
        wait_until(lambda: lost, what="the loss")
        assert "could not send F1 to stage 1" in lost[0]


@pytest.mark.parametrize("backend", ["direct", "socket"])
def test_a_sender_whose_receiver_is_killed_under_a_large_parcel_is_told(
    tmp_path: Path, backend: str
) -> None:
    lost: list[str] = []
    arguments = {"window": 8, "on_link_lost": lost.append}
    with stream_to_neighbour(tmp_path, backend, **arguments) as (sender, receiver):
        for number in range(4):  # one is held there, the others wait in the link and behind it
            sender.put(large_parcel(number))
        receiver.say("take 0")
        receiver.read()
        receiver.kill()
        wait_until(lambda: lost, what="the loss")
        assert re.match(r"could not send F[123] to stage 1", lost[0])


def test_strict_tells_nothing_of_a_killed_receiver_until_it_is_aborted(tmp_path: Path) -> None:
    with stream_to_neighbour(tmp_path, "strict") as (sender, receiver):
        for number in range(3):
            sender.put(neighbours_parcel(number))
        receiver.kill()
        with pytest.raises(DeadlineError, match="for stage 1 to take F1"):
            sender.flush(timeout_s=2)
        sender.close()  # aborts the link
        assert not sender._thread.is_alive()


def test_a_sender_whose_receiver_is_stopped_can_be_closed(tmp_path: Path, backend: str) -> None:
    with stream_to_neighbour(tmp_path, backend, window=8) as (sender, receiver):
        receiver.process.send_signal(signal.SIGSTOP)
        for number in range(4):  # more than any link holds on its way
            sender.put(large_parcel(number))
        with pytest.raises(DeadlineError):
            sender.flush(timeout_s=0.3)
        sender.close()
        assert not sender._thread.is_alive()


# -- restarts -----------------------------------------------------------------------------------


def test_a_receiver_that_is_killed_and_started_again_gets_what_it_needs(
    tmp_path: Path, backend: str
) -> None:
    with (
        zmq.Context() as context,
        neighbours(tmp_path, backend) as start,
        closing(sending_stream(context, backend=backend, window=8, wait_timeout_s=60)) as sender,
    ):
        first = start("receiver")
        first.say("connect 1 0")
        sender.connect(1, receiving_peer(first.endpoint))
        for number in range(7):
            sender.put(neighbours_parcel(number))
        first.take(0, 1, 2, 3)
        first.kill()  # it holds a parcel, and another one is under way
        second = start("receiver", incarnation=1)
        second.say("resume 2", "connect 2 0")
        sender.connect(2, receiving_peer(second.endpoint, incarnation=1))
        second.take(2, 3, 4, 5, 6)


def test_a_sender_that_is_killed_and_started_again_makes_all_anew_and_sends_the_rest(
    tmp_path: Path, backend: str
) -> None:
    with (
        zmq.Context() as context,
        neighbours(tmp_path, backend) as start,
        closing(
            receiving_stream(context, tmp_path, backend=backend, wait_timeout_s=60)
        ) as receiver,
    ):
        first = start("sender")
        receiver.expect(1, sending_peer())
        first.say(f"connect 1 0 {receiver.endpoint}", *["put"] * 5)
        taken = [receiver.take(Op(Kind.FORWARD, 0)), receiver.take(Op(Kind.FORWARD, 1))]
        wait_until(lambda: receiver.ready(Op(Kind.FORWARD, 4)), what="F4")
        first.kill()
        second = start("sender", incarnation=1)
        receiver.expect(2, sending_peer(incarnation=1))
        second.say("resume 1", f"connect 2 0 {receiver.endpoint}", *["put"] * 6)
        taken += [receiver.take(Op(Kind.FORWARD, number)) for number in range(2, 7)]
        for number, parcel in enumerate(taken):
            assert parcel.number == number
            assert digest_of(tensors_of(parcel.value)) == neighbours_digest(number)


def test_both_ends_that_are_killed_go_on_from_the_same_parcel(tmp_path: Path, backend: str) -> None:
    with neighbours(tmp_path, backend) as start:
        for incarnation, (resume, stop) in enumerate([(0, 5), (3, 8)]):
            generation = incarnation + 1
            receiver = start("receiver", incarnation)
            sender = start("sender", incarnation)
            receiver.say(f"resume {resume}", f"connect {generation} {incarnation}")
            sender.say(
                f"resume {resume}",
                f"connect {generation} {incarnation} {receiver.endpoint}",
                *["put"] * (stop - resume + 2),
            )
            receiver.take(*range(resume, stop))
            sender.kill()
            receiver.kill()
